"""``frozen_weights``: its contract on the zoo, who reads and writes such weights, and what is kept."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pair import found_by_two, run_as_two
from kept_bytes import kept_bytes
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers.pytorch_utils import Conv1D

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.measure.feed import repeated
from autotune.measure.profiling.tracer import Tracer
from autotune.measure.profiling.watch import watched_step
from autotune.plan import Budget, Plan
from autotune.search_spaces import load_space
from autotune.techniques import Settings, frozen_weights
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.frozen_weights import FrozenWeights
from autotune.techniques.layers import Layers
from autotune.techniques.parallel import Parallel
from autotune.techniques.precision import Precision
from autotune.techniques.support.bits.freezing import freeze
from autotune.techniques.support.bits.frozen_weight import FrozenWeight
from autotune.techniques.tiles import Tiles
from autotune.testing.facts import facts_of
from autotune.testing.runs import relative_difference, run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO
from autotune.units import MIB

EIGHT, FOUR = FrozenWeights(kind="8bit"), FrozenWeights(kind="4bit")
KINDS = pytest.mark.parametrize("setting", [EIGHT, FOUR], ids=lambda one: one.kind)
FEATURES, SAMPLES = 512, 16
BUDGET = Budget(device="cpu")


@pytest.fixture
def _everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small: the zoo's are. That of all trains, which has none."""
    monkeypatch.setattr(frozen_weights, "_LEAST_BYTES", 1)


@pytest.mark.usefixtures("_everything")
class TestFrozenWeights(TechniqueContract):
    technique = FrozenWeights
    lacking = (EIGHT, FOUR)

    @pytest.fixture(autouse=True)
    def _every_weight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The zoo's are small."""
        monkeypatch.setattr(frozen_weights, "_LEAST_BYTES", 1)


class Adapter(nn.Module):
    """A frozen layer with a correction of rank 4 that trains."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 4, bias=False), nn.Linear(4, FEATURES, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def stock_of(number: int = 3) -> nn.Module:
    torch.manual_seed(0)
    made = (nn.Linear, Conv1D, partial(nn.Linear, bias=False))
    return nn.Sequential(*(Adapter(made[one % 3](FEATURES, FEATURES)) for one in range(number)))


def of(model: nn.Module, setting: FrozenWeights = EIGHT, **others: Any) -> nn.Module:
    """A copy with the plan on it."""
    return autotune.apply_to_model(Plan(settings=Settings(frozen_weights=setting, **others)), copy.deepcopy(model))


def thawed(model: nn.Module) -> nn.Module:
    """A copy of the same numbers in full."""
    return autotune.apply_to_model(Plan(settings=Settings()), copy.deepcopy(model))


def results(model: nn.Module) -> list[torch.Tensor]:
    """Of a step: the loss, and gradients of the input and of what trains."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = model(x).square().mean()
    trained = [one for one in model.parameters() if one.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, [x, *trained])]


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(results(ours), results(theirs), strict=True):
        torch.testing.assert_close(one, other)


@KINDS
@pytest.mark.parametrize(
    "others",
    [{}, {"layers": Layers(kind="exact")}, {"checkpointing": Checkpointing(kind="blocks")}],
    ids=["alone", "layers", "checkpointing"],
)
def test_values_and_gradients_are_those_of_the_numbers_that_the_codes_stand_for(setting, others):
    """Linear layers, with and without bias, and transformers' Conv1D."""
    model = of(stock_of(), setting, **others)
    assert_same(model, thawed(model))


@KINDS
def test_how_far_codes_are_from_the_numbers(setting):
    stock, most = stock_of(), {"8bit": 0.006, "4bit": 0.11}[setting.kind]
    state, theirs = of(stock, setting).state_dict(), stock.state_dict()
    assert 0 < relative_difference(state, theirs) < most
    assert all(torch.equal(state[name], theirs[name]) for name in theirs if ".base.weight" not in name)


def test_a_layer_keeps_nothing_for_backward_beside_its_codes():
    """Adapters keep their input, 16 times 512 in fp32, and what is between them, 16 times 4."""
    model, x = of(stock_of(), layers=Layers(kind="exact")), torch.randn(SAMPLES, FEATURES)
    kept, output = kept_bytes(lambda: model(x.requires_grad_()), model)
    output.sum().backward()
    assert kept == 4 * 3 * SAMPLES * (FEATURES + 4)


class Head(nn.Module):
    """A loss over 64 words of a frozen head on 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 64).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(x)).flatten(0, 1), torch.arange(2 * SAMPLES))


@pytest.mark.usefixtures("_everything")
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
@KINDS
def test_the_loss_of_a_frozen_head_is_formed_in_pieces(setting, bf16):
    """Kept are the layer's input and the loss's gradient for the head's input, 32 times 8 each, and no logits."""
    torch.manual_seed(0)
    stock, x = Head(), torch.randn(2, SAMPLES, 8)
    ours, theirs = of(stock, setting, layers=Layers(kind="exact")), of(stock, setting)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        kept, loss = kept_bytes(lambda: ours(x), ours)
        other_loss = theirs(x)
    assert kept == 2 * SAMPLES * 8 * (2 + 2 if bf16 else 4 + 4)
    near = {"atol": 1e-3, "rtol": 0.02} if bf16 else {}
    torch.testing.assert_close(loss, other_loss, **near)
    wanted = torch.autograd.grad(other_loss, [*theirs.layer.parameters()])
    torch.testing.assert_close(torch.autograd.grad(loss, [*ours.layer.parameters()]), wanted, **near)


@KINDS
def test_a_table_gives_its_rows(setting):
    """Of rows that end within a block, too."""
    for features in (7, 64, 100, 256, 384, 512):
        table = of(nn.Sequential(nn.Embedding(50, features)).requires_grad_(False), setting)
        numbers = torch.tensor([[0, 49, 3], [7, 7, 48]])
        assert torch.equal(table(numbers), thawed(table)[0].weight[numbers])


class Tied(nn.Module):
    """A table that makes the output too, by a custom forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.adapter, self.head = nn.Embedding(64, FEATURES), Adapter(nn.Linear(FEATURES, FEATURES)), None
        self.table.requires_grad_(False)
        self.head = nn.Linear(FEATURES, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, numbers):
        hidden = self.adapter(self.table(numbers))
        return self.head(hidden) + hidden @ self.table.weight.t() + F.linear(hidden, self.head.weight * 2)


def test_tied_weights_stay_one_and_may_be_read_by_anybody():
    model = of(Tied())
    assert model.head.weight is model.table.weight
    assert isinstance(model.table.weight, FrozenWeight)
    other, numbers = thawed(model), torch.arange(64).view(8, 8)
    assert other.head.weight is other.table.weight
    assert type(other.head.weight) is nn.Parameter
    grads = []
    for one in (model, other):
        loss = one(numbers).square().mean()
        grads.append([loss, *torch.autograd.grad(loss, list(one.adapter.up.parameters()))])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_has_another_forward_or_makes_its_weight_is_left_alone():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layers = [Own(FEATURES, FEATURES), nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, FEATURES))]
    model = of(nn.Sequential(*layers, nn.Linear(FEATURES, FEATURES)).requires_grad_(False))
    assert [isinstance(one, FrozenWeight) for one in model.parameters()].count(True) == 1
    assert isinstance(model[2].weight, FrozenWeight)


@KINDS
def test_a_state_dict_has_numbers_and_takes_numbers(setting):
    stock = stock_of()
    model = of(stock, setting)
    assert [(name, one.shape, type(one)) for name, one in model.state_dict().items()] == [
        (name, one.shape, torch.Tensor) for name, one in stock.state_dict().items()
    ]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in stock.named_parameters()]
    before = results(model)
    model.load_state_dict(model.state_dict())
    assert all(map(torch.equal, results(model), before))  # rounded twice is rounded once
    zeros = {name: torch.zeros_like(one) for name, one in stock.state_dict().items()}
    model.load_state_dict(zeros)
    assert model[0].base.weight.sum() == 0
    assert isinstance(model[0].base.weight, FrozenWeight)


def test_copies_and_pickles_have_codes_of_their_own():
    model, file = of(stock_of()), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for one in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert all(map(torch.equal, results(one), results(model)))
        assert isinstance(one[0].base.weight, FrozenWeight)
        assert one[0].base.weight.untyped_storage()._cdata != model[0].base.weight.untyped_storage()._cdata
        assert all(type(value) is torch.Tensor for value in one.state_dict().values())


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.requires_grad_(),
        lambda model: setattr(model[0].base.weight, "requires_grad", True),
        lambda model: setattr(model[0].base.weight, "grad", torch.zeros(FEATURES, FEATURES)),
    ],
)
def test_a_gradient_that_is_asked_for_later_is_refused_in_words(ask):
    model = of(stock_of())
    with pytest.raises(PlanError, match=r"settings: .* its gradient is asked for now"):
        ask(model)
    full = autotune.apply_to_model(Plan(settings=Settings()), model)
    assert full.requires_grad_()[0].base.weight.requires_grad


def test_the_memory_of_numbers_is_refused_in_words_and_the_numbers_are_given():
    weight = of(stock_of())[0].base.weight
    for ask in (weight.data_ptr, weight.storage, weight.__dlpack__):
        with pytest.raises(PlanError, match=r"the memory of a weight of \(512, 512\) is asked for"):
            ask()
    assert weight.numpy().shape == (FEATURES, FEATURES)
    assert weight.untyped_storage().nbytes() == FEATURES**2 + FEATURES**2 // 256 * 4


def test_what_is_written_into_a_weight_is_kept():
    weight = of(stock_of())[0].base.weight
    with torch.no_grad():
        weight[3] = 0
        weight.copy_(weight * 2)
    assert weight[3].abs().sum() == 0
    mean = weight.abs().mean()
    weight.data = weight.data / 2
    torch.testing.assert_close(weight.abs().mean(), mean / 2, rtol=0.01, atol=0)
    with pytest.raises(PlanError, match="were to take its place"):
        weight.data = torch.zeros(2, 2)


@pytest.mark.parametrize(
    "update",
    [
        lambda weight: weight.mul_(0.996).add_(torch.ones(()), alpha=0.004),
        lambda weight: torch._foreach_lerp_([weight], [torch.zeros_like(weight.numbers())], 0.01),
    ],
)
def test_a_moving_average_is_refused(update):
    """Its small steps would be rounded away."""
    weight = of(stock_of())[0].base.weight
    before = weight.numbers()
    with torch.no_grad(), pytest.raises(PlanError, match="updated in place, as by a moving average"):
        update(weight)
    assert torch.equal(weight.numbers(), before)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data[3].zero_(),
        lambda weight: weight[3].__setitem__(1, 0.0),
        lambda weight: weight.view(-1).copy_(torch.zeros(weight.numel())),
        lambda weight: weight[:3].t().fill_(1.0),
        torch.nn.init.orthogonal_,
    ],
)
def test_a_write_into_a_view_is_refused(write):
    """It would be lost."""
    weight = of(stock_of())[0].base.weight
    with torch.no_grad(), pytest.raises(PlanError, match="a part of a weight that is kept as codes is written to"):
        write(weight)


def test_rows_that_are_not_there_are_refused():
    table = nn.Embedding(50, 256).requires_grad_(False)
    freeze(nn.ModuleList([table]), "8bit")
    for wrong in (50, 1000, -1):
        with pytest.raises(RuntimeError, match="rows 0 to 49 were expected"):
            table(torch.tensor([0, wrong]))


def test_modules_are_looked_through_once_however_many_weights_there_are(monkeypatch):
    """A walk for each weight took a minute of 2,000."""
    asked: list[nn.Module] = []
    was = nn.Module.named_parameters
    monkeypatch.setattr(
        nn.Module, "named_parameters", lambda module, *a, **k: asked.append(module) or was(module, *a, **k)
    )
    every = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(8)]).requires_grad_(False)
    asked.clear()
    assert freeze(every, "8bit") == 8
    assert asked == [every, *every]
    assert all(isinstance(one.weight, FrozenWeight) for one in every)


def test_it_is_read_in_inference_mode():
    model = of(stock_of())
    weight = model[0].base.weight
    with torch.inference_mode():
        read = torch.ones(2, weight.shape[0]) @ weight
        state = model.state_dict()
    torch.testing.assert_close(read, torch.ones(2, weight.shape[0]) @ weight)
    assert all(type(one) is torch.Tensor for one in state.values())


def test_it_goes_to_another_dtype_and_device():
    model = of(stock_of())
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half(torch.ones(2, FEATURES, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert half.state_dict()["0.base.weight"].dtype is torch.bfloat16
    assert half[0].base.weight.untyped_storage().nbytes() == model[0].base.weight.untyped_storage().nbytes()
    on_meta = copy.deepcopy(model).to("meta")
    assert on_meta[0].base.weight.is_meta
    assert on_meta[0].base.weight.untyped_storage().device.type == "meta"


def test_a_second_gradient_and_torchs_functions():
    model = of(stock_of())
    full, x = thawed(model), torch.randn(4, FEATURES, requires_grad=True)
    found = []
    for one in (model, full):
        (first,) = torch.autograd.grad(one(x).square().square().mean(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append([second, torch.func.grad(lambda x, one=one: one(x).square().mean())(x)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def task(number: int = 6) -> autotune.Task:
    return autotune.Task(
        build_model=lambda: stock_of(number),
        build_dataset=lambda: list(torch.randn(64, FEATURES, generator=torch.Generator().manual_seed(0))),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        batch_size=SAMPLES,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_trains_with_accumulation_and_autocast(precision):
    both = Settings(precision=Precision(kind=precision), batch=Batch(micro=8, accumulate=2))
    stock, ours = (run_applied(task(), both.having(one)) for one in (FrozenWeights(), EIGHT))
    assert 0 < relative_difference(ours.state, stock.state) < 0.01


@KINDS
def test_predicted_is_what_a_step_takes(setting):
    """Six weights of 1 MiB: less in codes, by hand, but for the one that is in full at a time."""
    plans = [Plan(settings=Settings(frozen_weights=one), budget=BUDGET) for one in (FrozenWeights(), setting)]
    stock, ours = (fit_memory_model(plan, task()).peak_bytes(SAMPLES) for plan in plans)
    in_codes = {"8bit": 2**18 + 2**12, "4bit": 2**17 + 2**13}[setting.kind]
    saved = 6 * (MIB - in_codes) - MIB
    assert saved - MIB < stock - ours <= saved
    training = autotune.apply(plans[1], task())
    batch = next(iter(training.loader))
    for _ in range(2):  # the optimizer has its state from the first
        tracer = Tracer(training.model, training.optimizer, torch.device("cpu"))
        watched_step(training, task(), repeated(training.loader, batch), tracer)
    assert tracer.trace().peak_bytes() == pytest.approx(ours, rel=0.01)


def test_it_is_refused_where_it_cannot_be():
    with pytest.raises(PlanError, match=r"settings\.frozen_weights\.kind: no weight .* or use kind: none"):
        autotune.apply(Plan(settings=Settings(frozen_weights=EIGHT)), ZOO["mlp"])
    settings = Settings(frozen_weights=EIGHT)
    assert "frozen_weights: a compiled program" in (settings.having(Compile(kind="model")).conflict() or "")
    assert "frozen_weights: fsdp" in (settings.having(Parallel(kind="fsdp", processes=2)).conflict() or "")
    assert settings.having(Tiles(kind="feed_forward")).conflict() is None


def test_what_it_affects_and_when_it_is_allowed():
    """8 bits round; 4 bits change the function, which the user must allow."""
    known = facts_of(ZOO["frozen"]).model_copy(update={"frozen_bytes": 64 * MIB})
    assert FrozenWeights.choices(known) == (FrozenWeights(), EIGHT, FOUR)
    assert FrozenWeights.choices(known.model_copy(update={"allow_lossy": False})) == (FrozenWeights(), EIGHT)
    assert [one.exactness(known) for one in (FrozenWeights(), EIGHT, FOUR)] == ["exact", "rounding", "lossy"]
    assert [Settings(frozen_weights=one).affect("function") for one in (EIGHT, FOUR)] == [False, True]
    assert "which is not worth it" in (EIGHT.unavailable(facts_of(ZOO["frozen"])) or "")


def test_presets_leave_it_out_until_it_is_listed():
    known = facts_of(ZOO["frozen"]).model_copy(update={"frozen_bytes": 64 * MIB})
    for name in ("default", "exact", "lossy"):
        assert load_space(name).choices(known).get("frozen_weights", (FrozenWeights(),)) == (FrozenWeights(),)


def found_by(rank: int) -> list[Any]:
    """The state after a step of DDP, of which the second rank begins with other weights."""
    model = of(stock_of())
    with torch.no_grad():
        for parameter in model.parameters() if rank else ():
            parameter.copy_(parameter * 0.5)
    parallel = DistributedDataParallel(model)
    parallel(torch.randn(SAMPLES, FEATURES)).square().mean().backward()
    gradients = [float(one.grad.norm()) for one in model.parameters() if one.requires_grad]
    kinds = [type(one) is FrozenWeight for one in model.parameters()].count(True)
    return [{name: float(one.norm()) for name, one in model.state_dict().items()}, gradients, kinds]


@pytest.mark.slow
def test_two_processes_begin_with_the_same_codes(tmp_path: Path):
    """The first's."""
    first, second = found_by_two(__file__, tmp_path)
    assert first == second
    assert first[0] == {name: float(one.norm()) for name, one in of(stock_of()).state_dict().items()}
    assert first[2] == 3


if __name__ == "__main__":
    run_as_two(found_by)
