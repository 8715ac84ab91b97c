"""``precision: {kind: float8}``: its products by hand and against stock torch, the contract, and what it leaves alone.

Its kernel has a CPU's emulation, by which all of this runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from autotune.errors import PlanError
from autotune.estimates.tracing.fake_step import FakeTraining
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings, Technique
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.frozen_weights import FrozenWeights
from autotune.techniques.layers import Layers
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.parallel import Parallel
from autotune.techniques.precision import Precision
from autotune.techniques.support.bits.float8_linear import Float8Linear, layers_for_float8, to_float8
from autotune.testing.facts import BARE
from autotune.testing.runs import Run, relative_difference, run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import BATCH_SIZE
from autotune.training.apply_plan import apply

FLOAT8 = Precision(kind="float8")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 1040), nn.Linear(1040, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 2048)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(22, 32, generator=generator)
    return TensorDataset(x, x.argmax(1))


TASK = Task(
    build_model=Model,
    build_dataset=_samples,
    compute_loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=BATCH_SIZE,
)


@pytest.fixture
def has_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card that has it."""
    monkeypatch.setattr("autotune.techniques.precision.has_float8", lambda: True)


@pytest.mark.usefixtures("has_float8")
class TestFloat8(TechniqueContract):
    technique = Precision
    tasks = {"blocks": TASK}
    lacking = (FLOAT8,)

    def _choices(self, task: Task) -> tuple[Technique, ...]:
        return Precision(), FLOAT8

    def test_choices_are_available_and_start_with_the_users_own(self, zoo_task: Task) -> None:
        """What a CPU's are is said by ``precision``'s own contract; a card's are below."""

    def check(self, choice, facts, found: Run, wanted: Run) -> None:
        """As with bf16, within what 3 bits of mantissa change."""
        assert [len(found.losses), *found.state] == [len(wanted.losses), *wanted.state]
        for name, difference in self._differences(found, wanted):
            assert difference <= {"losses": 0.01, "gradients": 0.1, "trained states": 0.01}[name], name


def test_a_product_by_hand():
    """An input of 224 and 1 has a scale of 2, a weight of 7 and -448 one of 1: 8 bits hold all of it."""
    linear = nn.Linear(16, 16, bias=False)
    linear.__class__ = Float8Linear
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[0, 0], linear.weight[1, 1] = 7.0, -448.0
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 224.0, 1.0
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(x)
    assert found[0, :3].tolist() == [1568.0, -448.0, 0.0]
    assert found.dtype == torch.bfloat16


def test_what_8_bits_do_not_hold_is_rounded_by_the_largest_value():
    """Of e4m3 numbers between 256 and 448 every 32nd is there: by a scale of 4, 100 and 70 are 400 and 280, which is as
    far from 256 as from 288, whose mantissa is even."""
    linear = nn.Linear(16, 16, bias=False)
    linear.__class__ = Float8Linear
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0] = 100.0, 70.0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        linear.weight.zero_().fill_diagonal_(1.0)
        assert linear(x)[:, 0].tolist() == [96.0, 72.0]


def _run(linear: nn.Linear, x: Tensor, grad: Tensor, enabled: bool = True) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    x, parameters = x.clone().requires_grad_(), [*linear.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        y = linear(x)
    return [y.detach().float(), *torch.autograd.grad(y, (x, *parameters), grad.to(y.dtype))]


@pytest.mark.parametrize("shape", [(4, 16), (3, 7), (1,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_fp32_within_its_rounding(shape: tuple[int, ...], bias: bool):
    """Relative error of a number of 3 bits of mantissa is 3.6 % at most and 2 % on average, of one of 2 bits twice
    that; rows need not be a multiple of 16."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias)
    x, grad = 3 * torch.randn(*shape, 64), 1e-6 * torch.randn(*shape, 48)
    wanted = _run(linear, x, grad, enabled=False)
    linear.__class__ = Float8Linear
    found = _run(linear, x, grad)
    assert [one.dtype for one in found] == [torch.float32] * len(found)
    for one, other, most in zip(found, wanted, (0.05, 0.08, 0.08, 0.005), strict=False):
        assert one.shape == other.shape
        assert 1e-4 < (one - other).norm() / other.norm() < most


def test_without_autocast_it_is_stock():
    torch.manual_seed(0)
    linear, x, grad = nn.Linear(64, 48), torch.randn(5, 64), torch.randn(5, 48)
    wanted = _run(linear, x, grad, enabled=False)
    linear.__class__ = Float8Linear
    assert all(map(torch.equal, _run(linear, x, grad, enabled=False), wanted))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["input", "weight", "grad"])
def test_what_is_no_number_does_not_vanish(bad: float, where: str):
    """A step with it is seen to be at fault, as in stock torch."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48)
    linear.__class__ = Float8Linear
    x, grad = torch.randn(5, 64), torch.randn(5, 48)
    with torch.no_grad():
        {"input": x, "weight": linear.weight, "grad": grad}[where][1, 1] = bad
    found = _run(linear, x, grad)
    assert found[0].isfinite().any() == (where == "grad")
    assert not found[1 if where != "input" else 2].isfinite().any()


def test_zeros_give_zeros():
    linear = nn.Linear(64, 48)
    linear.__class__ = Float8Linear
    y, *grads = _run(linear, torch.zeros(5, 64), torch.zeros(5, 48))
    assert torch.equal(y, linear.bias.detach().bfloat16().float().expand(5, 48))
    assert not any(one.any() for one in grads)
    assert _run(linear, torch.zeros(0, 64), torch.zeros(0, 48))[0].shape == (0, 48)


def test_it_keeps_a_byte_for_each_input_and_none_where_the_weight_is_frozen():
    """256 inputs of 64 features in 8 bits, and two scales of 4 bytes, beside the weight itself."""
    for trains, wanted in ((True, 256 * 64 + 8), (False, 4)):
        linear = nn.Linear(64, 48).requires_grad_(trains)
        linear.__class__ = Float8Linear
        kept: dict[int, int] = {}

        def pack(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.data_ptr()] = x.nbytes
            return x

        x = torch.randn(256, 64, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = linear(x)
        own = kept.pop(linear.weight.data_ptr())
        assert (own, sum(kept.values())) == (64 * 48 * 4, wanted)
        y.sum().backward()
        assert x.grad is not None


def test_layers_are_those_of_blocks_that_are_large_enough():
    """Not the head, nor what is small, nor what has other sizes than multiples of 16, nor what does more than
    multiply."""
    model = Model()
    assert [*layers_for_float8(model.blocks)] == [block.up for block in model.blocks]
    model.blocks[0].up = nn.Linear(32, 1048)
    model.blocks[1].up.register_forward_hook(lambda *_: None)
    assert to_float8(model.blocks) == 0
    model.blocks[0].up = nn.Linear(32, 1056)
    assert to_float8(model.blocks) == 1
    assert isinstance(model.blocks[0].up, nn.Linear)


@pytest.mark.usefixtures("has_float8")
@pytest.mark.parametrize(
    "other",
    [Checkpointing(kind="blocks"), Checkpointing(kind="selective"), OptimizerStep(kind="in_backward")],
    ids=lambda one: one.kind,
)
def test_beside_others_it_is_what_it_is_without(other: Technique):
    alone, both = (run_applied(TASK, Settings(precision=FLOAT8).having(*more)) for more in ((), (other,)))
    if not other.frees_gradients:
        assert relative_difference(both.gradients, alone.gradients) == 0.0
    assert both.losses == alone.losses
    assert relative_difference(both.state, alone.state) == 0.0


@pytest.mark.slow
@pytest.mark.usefixtures("has_float8")
def test_compiled_it_is_what_it_is_without():
    """Up to the order of bf16's sums."""
    alone, compiled = (
        run_applied(TASK, Settings(precision=FLOAT8, compile=Compile(kind=kind))) for kind in ("none", "blocks")
    )
    assert relative_difference(compiled.gradients, alone.gradients) <= 0.02


@pytest.mark.usefixtures("has_float8")
def test_a_plan_without_it_makes_layers_stock_again():
    model = apply(Plan(settings=Settings(precision=FLOAT8)), TASK).model
    assert type(model.blocks[0].up) is Float8Linear
    assert type(model.blocks[0].down) is type(model.head) is nn.Linear


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Layers(kind="exact"), "memory-saving layers take the place"),
        (FrozenWeights(kind="8bit"), "float8 rounds weights that are in memory"),
        (Offload(kind="parameters", to="disk"), "float8 rounds weights that are in memory"),
        (Offload(kind="parameters", to="host"), "float8 rounds weights that are in memory, and not codes or elsewhere"),
        (Parallel(kind="fsdp", processes=2), "float8 was not tried with weights in shards"),
        (Parallel(kind="tensor", processes=2), "float8 was not tried with weights in shards"),
    ],
    ids=lambda one: "" if isinstance(one, str) else f"{one.name}-{one.kind}",
)
def test_what_it_does_not_go_with_is_said(other: Technique, words: str):
    assert words in (Settings(precision=FLOAT8).having(other).conflict() or "")
    assert Settings(precision=Precision(kind="bf16")).having(other).conflict() is None


def _facts(**others: object):
    device = BARE.device.model_copy(update={"type": "cuda", "capability": (9, 0), "bf16": True})
    return BARE.model_copy(update={"device": device, "float8_numbers": 4096} | others)


def _reasons() -> Iterator[tuple[str, str]]:
    old = _facts().device.model_copy(update={"capability": (8, 6)})
    amd = _facts().device.model_copy(update={"capability": (9, 4), "is_amd": True})
    given = {
        "had": {},
        "device": {"device": old},
        "AMD": {"device": amd},
        "exact": {"allow_lossy": False},
        "inference": {"inference": True},
        "small": {"float8_numbers": 0},
        "shards": {"shared_by": "fsdp"},
        "autocast": {"own_autocast": True},
    }
    for name, others in given.items():
        yield name, FLOAT8.unavailable(_facts(**others)) or ""


def test_it_is_offered_where_a_card_has_it_and_losses_are_allowed():
    assert dict(_reasons()) == {
        "had": "",
        "device": "bare CPU has no float8 products (CUDA, compute capability 8.9 and up)",
        "AMD": "bare CPU has no float8 products (CUDA, compute capability 8.9 and up)",
        "exact": "it changes what the model computes, which --max-quality-drop allows",
        "inference": "it was tried in training alone",
        "small": "no block of the model has a linear layer that is large enough, of multiples of 16 features",
        "shards": "it was not tried with weights in shards",
        "autocast": "the model has an autocast of its own, to which precision is left",
    }
    assert FLOAT8 in Precision.choices(_facts())
    assert FLOAT8.exactness(_facts()) == "lossy"
    assert FLOAT8.changes_function
    assert not Precision(kind="bf16").changes_function


def test_it_is_planned_for_a_card_that_is_not_here():
    """A step of 1,024 samples, traced for CUDA: as many products as bf16. Each of two layers keeps 8 bits of 1,024 × 32
    inputs, two scales of 4 bytes, and no copy of its 1,040 × 32 weights, where bf16 keeps 16 bits of both."""
    peaks, products = {}, {}
    for kind in ("bf16", "float8"):
        plan = Plan(settings=Settings(precision=Precision(kind=kind)))
        step = FakeTraining(plan, TASK, target="cuda").step(1024)
        peaks[kind] = step.trace.peak_bytes()
        products[kind] = sum(work.flops for work in step.work.values())
    assert products["float8"] == products["bf16"]
    assert peaks["bf16"] - peaks["float8"] == 2 * (1024 * 32 + 2 * 1040 * 32 - 2 * 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_its_device_it_is_an_error():
    with pytest.raises(PlanError, match=r"float8 needs a CUDA device of compute capability 8\.9\. Use bf16"):
        apply(Plan(settings=Settings(precision=FLOAT8)), TASK)


@pytest.mark.usefixtures("has_float8")
def test_a_model_without_such_layers_is_refused():
    small = Task(build_model=lambda: nn.Linear(16, 16), build_dataset=_samples, compute_loss=TASK.compute_loss)
    with pytest.raises(PlanError, match="no block of the model has a linear layer of more than 1,024 outputs"):
        apply(Plan(settings=Settings(precision=FLOAT8, batch=Batch(micro=2))), small)
