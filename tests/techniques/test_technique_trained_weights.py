"""``trained_weights``: its contract, what is kept in bfloat16, and updates that are right on average."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools

import pytest
import torch
from line_task import line, training_of
from search_tables import facts
from torch import nn

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.plan import Plan
from autotune.search_spaces import load_space
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizers import trained_weights
from autotune.techniques.optimizers.optimizer_state import OptimizerState
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.optimizers.trained_weights import TrainedWeights
from autotune.techniques.parallel import Parallel
from autotune.techniques.precision import Precision
from autotune.techniques.support.bits import kept_state
from autotune.techniques.support.bits.stores import BFloat16, by_noise
from autotune.testing.techniques import TechniqueContract

BF16 = TrainedWeights(kind="bf16")
KINDS = ("default", "bf16", "8bit", "4bit", "factored")
"""Of ``optimizer_state``."""
pytestmark = pytest.mark.usefixtures("one_thread_only")


@pytest.fixture(autouse=True)
def _pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is updated in several."""
    monkeypatch.setattr(kept_state, "LEAST_PIECE", 2**11)


class TestTrainedWeights(TechniqueContract):
    technique = TrainedWeights
    lacking = (BF16,)
    keeps_shapes = False
    refuses = {"loss scaler": "weights in bf16 are computed with in it"}

    @pytest.fixture(autouse=True)
    def _every_parameter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The zoo's are small."""
        monkeypatch.setattr(trained_weights, "_LEAST_BYTES", 0)
        monkeypatch.setattr(kept_state, "LEAST", 1)
        monkeypatch.setattr(kept_state, "LEAST_PIECE", 256)


def plan(state: str = "default", **others) -> Plan:
    return Plan(settings=Settings(trained_weights=BF16, optimizer_state=OptimizerState(kind=state), **others))


def weights() -> list[nn.Parameter]:
    """One in channels_last of no whole number of pieces, and one that stays in fp32."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn((32, 33, 3, 3), generator=generator).to(torch.bfloat16, memory_format=torch.channels_last)
    return [nn.Parameter(image), nn.Parameter(torch.ones(5))]


def train(parameters, optimizer, steps: int, scheduler=None) -> None:
    for step in range(steps):
        sum(
            (p.float() - p.detach().float().roll(1) * 0.5).square().sum() * (1 + step % 2) for p in parameters
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def test_the_mean_of_what_is_rounded_is_the_number():
    """1 + 0.3 of bfloat16's step of 2^-7 goes up at 0.3 of 40,000 draws, within four standard deviations of
    sqrt(0.3 * 0.7 / 40,000); of either sign, and what bfloat16 has stays."""
    value, draws = 1 + 0.3 / 128, 40_000
    noise = torch.rand(draws, generator=torch.Generator().manual_seed(0))
    for sign in (1.0, -1.0):
        found = by_noise(torch.full((draws,), sign * value), noise)
        assert {*found.tolist()} == {sign * 1.0, sign * (1 + 1 / 128)}
        up = float(((found.abs() - 1) * 128).mean())
        assert abs(up - 0.3) < 4 * (0.3 * 0.7 / draws) ** 0.5
    exact = torch.tensor([0.0, 1.0, -1.0078125, 2.0**-126, float("inf"), -float("inf")])
    for most in (0.0, 1 - 2**-24):
        assert torch.equal(by_noise(exact, torch.full((6,), most)), exact)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
def test_what_is_no_number_stays_none(bits):
    """A card's own is 0x7fffffff, to which noise adds a sign and zeros."""
    values = torch.full((8,), bits, dtype=torch.int32).view(torch.float32)
    for noise in (torch.zeros(8), torch.full((8,), 0.999)):
        assert by_noise(values, noise).isnan().all()
        fields = BFloat16().empty(values)
        BFloat16().write(fields, 0, values, False, noise)
        assert BFloat16().read(fields, 0, 8, False).isnan().all()


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_update_of_a_small_part_of_a_step_is_made_on_average(is_fused):
    """A weight of 1.0 and 100 steps of 1e-4, of 2^-8 below 1: it is at 0.99 on average of 4,096, and plain bfloat16 is
    where it was."""

    def moved(is_ours: bool) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=1e-4, fused=is_fused)
        if is_ours:
            autotune.apply_to_optimizer(plan(), optimizer)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert weight.dtype is torch.bfloat16
        return weight.detach().float()

    assert torch.equal(moved(False), torch.ones(64, 64))
    # each of the 100 roundings is of variance at most (2^-8)^2 / 4
    assert abs(float(moved(True).mean()) - 0.99) < 4 * 2**-9 * (100 / 4096) ** 0.5
    assert float(moved(True).std()) > 0


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize(
    ("name", "kind", "most"),
    [("SGD", "4bit", 0.02), ("AdamW", "4bit", 0.13), ("AdamW", "8bit", 0.04), ("AdamW", "factored", 0.04)],
)
def test_what_is_small_beside_others_moves_as_far_as_it_should(monkeypatch, name, kind, most, is_bf16):
    """In 200 steps of one gradient, 0.05 of its block's largest: what is rounded, weight and averages, is rounded each
    by itself. A root of squares in 4 bits is off by itself: of codes 3^4 and 4^4 for 3.35^4, its inverse by 0.11."""
    monkeypatch.setattr(kept_state, "LEAST_PIECE", 2**13)
    weight = nn.Parameter(torch.ones((32, 256), dtype=torch.bfloat16 if is_bf16 else torch.float32))
    small = torch.arange(256) % 64 > 0
    gradient = torch.where(small, 0.05, 1.0).to(weight.dtype).expand(32, 256).contiguous()
    build = {"SGD": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9), "AdamW": lambda p: torch.optim.AdamW(p, 1e-4)}
    settings = plan(kind).settings if is_bf16 else Settings(optimizer_state=OptimizerState(kind=kind))
    optimizer = autotune.apply_to_optimizer(Plan(settings=settings), build[name]([weight]))
    for _ in range(200):
        weight.grad = gradient.clone()
        optimizer.step()
    true = {"SGD": 1e-4 * 0.05 * sum((1 - 0.9**n) / 0.1 for n in range(1, 201)), "AdamW": 0.02 + 200 * 1e-6}[name]
    assert float((1 - weight.detach().float()[:, small]).mean()) == pytest.approx(true, rel=most)


BUILDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.3}, {"params": p[1:]}], lr=0.1),
}
BYTES = {"default": 4, "bf16": 2, "8bit": 1 + 4 / 256, "4bit": 1 / 2 + 4 / 128, "factored": 0.55}
"""Of each average of an element; factored, one is in 8 bits, the other 195 numbers for 9,504 elements."""


@pytest.mark.parametrize(("name", "kind"), [*itertools.product(BUILDS, KINDS[:-1]), ("AdamW", "factored")])
def test_weights_move_as_in_fp32(name, kind):
    """With the same kind of state, which is of the same bytes as fp32's; by a learning rate that falls, in groups."""
    ours, theirs = weights(), [nn.Parameter(p.detach().float()) for p in weights()]
    stock = Plan(settings=Settings(optimizer_state=OptimizerState(kind=kind)))
    for parameters, one in ((ours, plan(kind)), (theirs, stock)):
        optimizer = BUILDS[name](parameters)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(parameters, autotune.apply_to_optimizer(one, optimizer), 20, scheduler)
        tensors = [t for t in optimizer.state[parameters[0]].values() if isinstance(t, torch.Tensor) and t.dim()]
        num_bytes = sum(t.nbytes for t in tensors) / ours[0].numel() / (1 if name == "SGD" else 2)
        assert num_bytes == pytest.approx(BYTES[kind], rel=0.05)
    start = weights()[0].detach().float()
    difference = (ours[0].float() - theirs[0]).norm() / (theirs[0] - start).norm()
    assert 0 < difference < (0.1 if kind in ("4bit", "factored") else 0.02), difference
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("then", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_a_state_dict_goes_from_kind_to_kind(before, then):
    """Through a file that is read by weights alone; to the same kind to the bit, draws included."""
    parameters = weights()
    optimizer = autotune.apply_to_optimizer(plan(before), torch.optim.AdamW(parameters, lr=0.1))
    train(parameters, optimizer, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    ours = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = autotune.apply_to_optimizer(plan(then), torch.optim.AdamW(ours, lr=0.1))
    other.load_state_dict(torch.load(file, weights_only=True))
    train(parameters, optimizer, 3)
    train(ours, other, 3)
    if before == then:
        assert all(map(torch.equal, ours, parameters))
    off = (ours[0].float() - parameters[0].float()).norm() / (parameters[0].float() - weights()[0].float()).norm()
    assert off < (0.25 if {"4bit", "factored"} & {before, then} else 0.02), off


@pytest.mark.parametrize("kind", ["default", "8bit"])
def test_a_number_of_nadam_is_not_rounded_as_its_weight(kind):
    """The product of its momenta, which all later steps go by: resumed, it trains on to the bit."""
    parameters = weights()
    optimizer = autotune.apply_to_optimizer(plan(kind), torch.optim.NAdam(parameters, lr=0.1))
    train(parameters, optimizer, 5)
    ours = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = autotune.apply_to_optimizer(plan(kind), torch.optim.NAdam(ours, lr=0.1))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    numbers = [one.state[p]["mu_product"] for one, p in ((optimizer, parameters[0]), (other, ours[0]))]
    assert numbers[0].dtype is numbers[1].dtype is torch.float32
    assert torch.equal(*numbers)
    train(parameters, optimizer, 3)
    train(ours, other, 3)
    assert all(map(torch.equal, ours, parameters))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_torch_alone_loads_what_is_kept_in_fp32(name):
    """By its own names and shapes, of a weight in channels_last."""
    parameters = weights()
    optimizer = autotune.apply_to_optimizer(plan(), BUILDS[name](parameters))
    train(parameters, optimizer, 5)
    theirs = [nn.Parameter(p.detach().float().contiguous()) for p in parameters]
    stock = BUILDS[name](theirs)
    stock.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    row = optimizer.state[parameters[0]]
    for key in {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}[name]:
        found = stock.state[theirs[0]][key]
        assert found.shape == theirs[0].shape
        assert torch.equal(found, row[f"{key}.float32"].as_strided(found.shape, parameters[0].stride()))
    train(theirs, stock, 1)


@pytest.mark.parametrize("kind", ["default", "8bit", "factored"])
def test_a_step_in_backward_is_the_same_to_the_bit(kind):
    found = []
    for step in ("after_backward", "in_backward"):
        parameters = weights()
        settings = plan(kind, optimizer_step=OptimizerStep(kind=step))
        train(parameters, autotune.apply_to_optimizer(settings, torch.optim.AdamW(parameters, lr=0.1)), 5)
        found.append(parameters)
    assert all(map(torch.equal, *found))


def test_a_loss_scaler_skips_its_step():
    parameters = weights()
    optimizer = autotune.apply_to_optimizer(plan(), torch.optim.Adam(parameters, lr=0.1, fused=True))
    train(parameters, optimizer, 2)
    before = [p.detach().clone() for p in parameters]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.float().sum() for p in parameters) * float("inf")).backward()
    scaler.step(optimizer)
    assert all(map(torch.equal, parameters, before))


def of_two_layers(**pieces):
    samples = torch.randn((16, 64), generator=torch.Generator().manual_seed(0))
    task = line([*samples], batch_size=4, build_optimizer=torch.optim.AdamW)
    build = lambda: nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64))  # noqa: E731
    return dataclasses.replace(task, **{"build_model": build, **pieces})


def test_what_is_large_is_in_bfloat16_and_a_next_plan_takes_it_back():
    """Matrices; norms and biases stay. It is called outside of any context, and loads what fp32 saved."""
    model = of_two_layers().build_model()
    tied = model[0].weight
    assert autotune.apply_to_model(plan(), model) is model
    assert [str(p.dtype)[6:] for p in model.parameters()] == ["bfloat16", *["float32"] * 3, "bfloat16", "float32"]
    assert model[0].weight is tied
    copied = copy.deepcopy(model)
    assert torch.equal(copied(torch.ones(2, 64)), model(torch.ones(2, 64)))
    saved = of_two_layers().build_model().state_dict()
    model.load_state_dict(saved)
    autotune.apply_to_model(Plan(settings=Settings()), model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.allclose(model[0].weight, saved["0.weight"], rtol=2**-8)
    assert model(torch.ones(2, 64)).dtype is torch.float32


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.LSTM(64, 64), [torch.randn(2, 3, 64)]),
        (nn.GRUCell(64, 64), [torch.randn(2, 64)]),
        (nn.Bilinear(32, 32, 32), [torch.randn(2, 32)] * 2),
        (nn.LayerNorm((64, 64)), [torch.randn(2, 64, 64)]),
        (nn.RMSNorm((64, 64)), [torch.randn(2, 64, 64)]),
        (nn.Embedding(1000, 64, sparse=True), [torch.tensor([1, 2])]),
        (nn.EmbeddingBag(1000, 64, sparse=True), [torch.tensor([[1, 2]])]),
    ],
)
def test_what_autocast_does_not_cast_or_rows_update_stays_in_fp32(layer, inputs):
    """Beside a layer that does not."""
    model = nn.ModuleList([copy.deepcopy(layer), nn.Linear(64, 64)])
    autotune.apply_to_model(plan(), model)
    assert {p.dtype for p in model[0].parameters()} == {torch.float32}
    assert model[1].weight.dtype is torch.bfloat16
    model[0](*inputs)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_part_of_a_model_may_be_called_by_itself(is_training):
    """In no context: by a step of validation, or a job's own loss. The next plan takes all of it off."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.ModuleDict({"first": nn.Sequential(nn.Linear(64, 64), nn.ReLU()), "second": layer})
    model.train(is_training)
    values = torch.randn((2, 5, 64), generator=torch.Generator().manual_seed(0))
    expected = [model["first"](values), model["first"][0](values), layer(values)]
    autotune.apply_to_model(plan(), model)
    with torch.set_grad_enabled(is_training):
        found = [model["first"](values), model["first"][0](values), layer(values)]
    assert all(torch.allclose(a.float(), b, atol=0.05) for a, b in zip(found, expected, strict=True))
    autotune.apply_to_model(Plan(settings=Settings()), model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("kind", "state"), [("default", 8), ("8bit", 2), ("4bit", 1), ("factored", 1.05)])
def test_the_memory_model_knows_what_is_kept(kind, state):
    """Eight weights of 65,536 elements: 2 bytes for each and its gradient, and the state's; as in real steps."""
    task = dataclasses.replace(
        line([torch.ones(256)] * 64, batch_size=8, build_optimizer=torch.optim.AdamW),
        build_model=lambda: nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))),
    )
    traced = fit_memory_model(plan(kind), task).peak_bytes(8) / 2**16
    assert 8 * (4 + state) <= traced < 8 * (4 + state) + 50
    assert fit_probed_model(plan(kind), task).peak_bytes(8) / 2**16 == pytest.approx(traced, rel=0.01)


def test_it_is_offered_where_it_is_allowed_and_worth_it():
    enough = facts(num_trainable=2**23)
    enough = enough.model_copy(update={"device": enough.device.model_copy(update={"bf16": True})})
    assert TrainedWeights.choices(enough) == (TrainedWeights(), BF16)
    for changed in (
        {"allow_lossy": False},
        {"num_trainable": 2**22},
        {"optimizer": "LBFGS"},
        {"own_autocast": True},
        {"acts_after_step": True},
    ):
        assert TrainedWeights.choices(enough.model_copy(update=changed)) == (TrainedWeights(),)
    for name in ("default", "exact", "lossy"):
        assert load_space(name).choices(enough).get("trained_weights", (TrainedWeights(),)) == (TrainedWeights(),)


def test_a_task_that_may_average_weights_is_refused():
    """A thousandth of a difference is less than half a step of bfloat16: the average would stay where it began."""
    task = of_two_layers(after_step=lambda model: None)
    with pytest.raises(PlanError, match=r"trained_weights\.kind: bf16: the task's after_step may average .* Use kind"):
        training_of(task, trained_weights=BF16)
    training_of(task)


def test_what_it_does_not_go_with_is_said():
    settings = plan().settings
    for other, words in (
        (Precision(kind="fp16"), "weights in bf16 are computed with in it"),
        (Parallel(kind="fsdp", processes=2), "use ddp"),
        (OptimizerState(kind="host"), "the host's step rounds"),
        (Batch(micro=1, accumulate=129), "lost in a sum in bf16"),
    ):
        assert words in (settings.having(other).conflict() or "")
    for other in (Precision(kind="bf16"), Batch(micro=1, accumulate=128)):
        assert settings.having(other).conflict() is None
    with pytest.raises(
        PlanError, match=r"trained_weights\.kind: bf16: it takes Adam.* but got Adagrad\. Use kind: none"
    ):
        autotune.apply_to_optimizer(plan(), torch.optim.Adagrad(weights()))
