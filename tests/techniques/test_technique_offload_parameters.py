"""``offload`` of parameters: who reads and writes such weights, and what is in memory."""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pair import found_by_two, run_as_two
from kept_bytes import kept_bytes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.pytorch_utils import Conv1D

import autotune
from autotune.errors import PlanError, UserError
from autotune.estimates.memory_model import fit_memory_model
from autotune.measure.feed import repeated
from autotune.measure.profiling.tracer import Tracer
from autotune.measure.profiling.watch import watched_step
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.frozen_weights import FrozenWeights
from autotune.techniques.layers import Layers
from autotune.techniques.offload import Offload
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.parallel import Parallel
from autotune.techniques.precision import Precision
from autotune.techniques.support.disk.offloaded_weight import OffloadedWeight
from autotune.testing.facts import facts_of
from autotune.testing.runs import run_applied
from autotune.testing.zoo import ZOO
from autotune.units import MIB

ON_DISK = Offload(kind="parameters")
FEATURES, SAMPLES = 512, 16


class Adapter(nn.Module):
    """A frozen layer with a correction of rank 4 that trains."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 4, bias=False), nn.Linear(4, FEATURES, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Pixels(nn.Module):
    """A frozen convolution of 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 5, padding=2)

    def forward(self, x):
        return self.conv(x.view(-1, 64, FEATURES // 64)).tanh().flatten(1)


def stock_of(number: int = 4) -> nn.Module:
    torch.manual_seed(0)
    made = (partial(nn.Linear, FEATURES, FEATURES), partial(Conv1D, FEATURES, FEATURES), Pixels)
    return nn.Sequential(*(Adapter(made[one % 3]()) for one in range(number)))


def of(model: nn.Module, setting: Offload = ON_DISK, **others: Any) -> nn.Module:
    """A copy with the plan on it."""
    return autotune.apply_to_model(Plan(settings=Settings(offload=setting, **others)), copy.deepcopy(model))


def results(model: nn.Module, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Of a step: the loss, and gradients of the input and of what trains."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(x).square().mean()
    trained = [one for one in model.parameters() if one.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, [x, *trained])]


def assert_same(ours: nn.Module, theirs: nn.Module, **how: Any) -> None:
    assert all(map(torch.equal, results(ours, **how), results(theirs, **how)))


def bytes_in_memory(model: nn.Module) -> int:
    """Of its weights, after a step."""
    results(model)
    there = sum(one.untyped_storage().nbytes() for one in model.parameters())
    ours = (one for one in model.parameters() if isinstance(one, OffloadedWeight))
    return there + sum(one._content._held.nbytes for one in ours if one._content._held is not None)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "others",
    [{}, {"layers": Layers(kind="exact")}, {"checkpointing": Checkpointing(kind="blocks")}],
    ids=["alone", "layers", "checkpointing"],
)
def test_values_and_gradients_are_the_stock_models(others, dtype):
    """Linear layers, transformers' Conv1D and convolutions, to the bit, under autocast too."""
    model, stock = of(stock_of(), **others), autotune.apply_to_model(Plan(settings=Settings(**others)), stock_of())
    for _ in range(2):
        assert_same(model, stock, dtype=dtype)


def test_weights_leave_memory_and_have_no_name_on_the_disk(monkeypatch, tmp_path):
    """But for biases and what trains: each has 2,048 numbers at most."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stock, model = stock_of(3), of(stock_of(3))
    trained = sum(one.nbytes for one in stock.parameters() if one.nbytes < 2**16)
    assert bytes_in_memory(model) == trained
    assert model[0].base.weight._content._place.file.end == 2 * MIB + 4 * 64 * 64 * 5
    assert not os.listdir(tmp_path)


def test_nothing_of_a_weight_is_kept_for_backward():
    """Stock keeps its copy in bf16 under autocast."""
    x, bytes_of = torch.randn(SAMPLES, FEATURES, requires_grad=True), {}
    for name, model in {"stock": stock_of(1), "ours": of(stock_of(1))}.items():
        with torch.autocast("cpu", torch.bfloat16):
            bytes_of[name], loss = kept_bytes(lambda model=model: model(x).square().mean(), model)
        loss.backward()
    assert bytes_of["stock"] - bytes_of["ours"] == 2 * FEATURES**2


def test_blocks_that_are_not_named_keep_theirs():
    model = of(stock_of(), Offload(kind="parameters", blocks=(1,)))
    assert [isinstance(one.base.weight, OffloadedWeight) for one in (model[0], model[1], model[3])] == [
        False,
        True,
        False,
    ]


def test_a_weight_that_two_modules_share_is_one():
    stock = stock_of(2)
    stock[1].base = stock[0].base
    model = of(stock)
    assert model[0].base.weight is model[1].base.weight
    assert_same(model, stock)


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
def test_memory_that_two_parameters_are_stays(trains):
    """What is written to the one reaches the other: neither is offloaded."""
    stock = stock_of()
    stock[1].base.weight = nn.Parameter(stock[0].base.weight.data, requires_grad=False)
    stock[0].base.weight.requires_grad_(trains)
    model = autotune.apply_to_model(Plan(settings=Settings(offload=ON_DISK)), stock)
    assert not any(isinstance(model[one].base.weight, OffloadedWeight) for one in (0, 1))
    with torch.no_grad():
        model[0].base.weight.zero_()
    assert not model[1].base.weight.any()


def test_a_forked_process_reads_what_was_there():
    """Also where its parent has other numbers since."""
    model = of(stock_of(1))
    weight: Any = model[0].base.weight
    results(model)
    before = weight.numbers()[0, 0].item()
    (go, let_go), (told, tell) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.read(go, 1)
        os.write(tell, str(weight.numbers()[0, 0].item()).encode())
        os._exit(0)
    for _ in range(2):
        with torch.no_grad():
            weight.add_(1)
        results(model)
    os.write(let_go, b"!")
    os.waitpid(child, 0)
    assert float(os.read(told, 99)) == before
    for one in (go, let_go, told, tell):
        os.close(one)


def test_room_is_used_again():
    model = of(stock_of(1))
    weight: Any = model[0].base.weight
    ends = set()
    for _ in range(3):
        with torch.no_grad():
            weight.add_(1)
        results(model)
        ends.add(weight._content.store.file().end)
    assert ends == {weight.nbytes}


def test_a_shape_is_not_changed_in_place():
    model = of(stock_of(1))
    with pytest.raises(PlanError, match=r"t_ was to change the shape of a weight of \(512, 512\) in place"):
        model[0].base.weight.data.t_()
    model[0].base.weight.detach_()


def test_state_dicts_are_full_both_ways():
    stock, model = stock_of(), of(stock_of())
    state = model.state_dict()
    assert all(type(one) is torch.Tensor and torch.equal(one, stock.state_dict()[key]) for key, one in state.items())
    other = {key: one * 2 for key, one in state.items()}
    model.load_state_dict(other)
    stock.load_state_dict(other)
    assert_same(model, stock)


def test_a_copy_is_of_its_own_and_survives_a_pickle():
    model = of(stock_of())
    results(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert_same(one, model)
        assert isinstance(one[0].base.weight, OffloadedWeight)
        assert one[0].base.weight._content._place.file is not model[0].base.weight._content._place.file
        with torch.no_grad():
            one[0].base.weight.zero_()
        assert model[0].base.weight.abs().sum() > 0


def test_applied_twice_and_undone():
    stock, model = stock_of(), of(stock_of())
    again = autotune.apply_to_model(Plan(settings=Settings(offload=ON_DISK)), model)
    assert_same(again, stock)
    plain = autotune.apply_to_model(Plan(settings=Settings()), again)
    assert all(type(one) is nn.Parameter for one in plain.parameters())
    assert not any(module._state_dict_hooks for module in plain.modules())
    assert_same(plain.requires_grad_(), stock.requires_grad_())


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight[3].zero_(),
        lambda weight: weight.__setitem__((slice(None), 2), 5.0),
        lambda weight: weight.view(-1)[:7].copy_(torch.arange(7.0)),
        lambda weight: weight.t().mul_(0.5).add_(1),
        lambda weight: weight.data.chunk(2)[1].fill_(3),
        lambda weight: torch._foreach_lerp_([weight], [torch.ones_like(weight)], 0.25),
        torch.nn.init.ones_,
    ],
)
def test_what_is_written_to_it_or_to_a_view_is_kept(write):
    ours, theirs = of(stock_of())[0].base.weight, stock_of()[0].base.weight
    half = ours.to(torch.bfloat16)
    before = theirs.to(torch.bfloat16)
    with torch.no_grad():
        write(ours)
        write(theirs)
    assert torch.equal(ours, theirs)
    assert torch.equal(half, before)  # a copy stays what it was


def test_it_goes_to_another_dtype_and_another_order():
    ours, theirs = of(stock_of()), stock_of()
    for one in (ours, theirs):
        one.double()
    x = torch.randn(2, FEATURES, dtype=torch.float64)
    assert torch.equal(ours(x), theirs(x))
    assert ours.state_dict()["0.base.weight"].dtype is torch.float64
    image = nn.Sequential(nn.Conv2d(64, 64, 3).requires_grad_(False), nn.Conv2d(64, 1, 3))
    model = of(image, Offload(kind="parameters", blocks=(0,))).to(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.clone().is_contiguous(memory_format=torch.channels_last)


def test_a_second_gradient_and_torchs_functions():
    model, stock = of(stock_of()), stock_of()
    x, found = torch.randn(4, FEATURES, requires_grad=True), []
    for one in (model, stock):
        (first,) = torch.autograd.grad(one(x).square().square().mean(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        with torch.inference_mode():
            read = torch.ones(2, FEATURES) @ one[0].base.weight
        found.append([second, torch.func.grad(lambda x, one=one: one(x).square().mean())(x), read])
    assert all(map(torch.equal, *found))


def test_an_optimizer_may_be_given_them_and_an_average_follows():
    found = []
    for model in (of(stock_of()), stock_of()):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for _ in range(2):
            model(torch.ones(2, FEATURES)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        found.append([*model.state_dict().values(), *average.module.state_dict().values()])
    assert all(map(torch.equal, *found))


def task(number: int = 6) -> autotune.Task:
    return autotune.Task(
        build_model=lambda: stock_of(number),
        build_dataset=lambda: list(torch.randn(64, FEATURES, generator=torch.Generator().manual_seed(0))),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        batch_size=SAMPLES,
    )


@pytest.mark.parametrize(
    "others", [{"precision": Precision(kind="bf16")}, {"optimizer_step": OptimizerStep(kind="in_backward")}]
)
def test_a_training_is_stocks(others):
    """With accumulation, where gradients are there to accumulate."""
    halves = Batch(micro=8, accumulate=2) if "precision" in others else Batch(micro=SAMPLES)
    stock, ours = (run_applied(task(), Settings(batch=halves, offload=one, **others)) for one in (Offload(), ON_DISK))
    assert ours.equals(stock)


@pytest.mark.parametrize(
    "others", [{}, {"checkpointing": Checkpointing(kind="blocks")}], ids=["alone", "checkpointing"]
)
def test_predicted_is_what_a_step_takes(others):
    """Weights of 1 MiB, of linear layers and Conv1D, are gone, but for the one that is in use."""
    plans = [
        Plan(settings=Settings(offload=one, batch=Batch(micro=SAMPLES), **others), budget=Budget(device="cpu"))
        for one in (Offload(), ON_DISK)
    ]
    stock, ours = (fit_memory_model(plan, task()).peak_bytes(SAMPLES) for plan in plans)
    assert 3 * MIB <= stock - ours < 5 * MIB
    training = autotune.apply(plans[1], task())
    batch = next(iter(training.loader))
    for _ in range(2):  # the optimizer has its state from the first
        tracer = Tracer(training.model, training.optimizer, torch.device("cpu"))
        watched_step(training, task(), repeated(training.loader, batch), tracer)
    assert tracer.trace().peak_bytes() == ours


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.requires_grad_(),
        lambda model: setattr(model[0].base.weight, "requires_grad", True),
        lambda model: setattr(model[0].base.weight, "grad", torch.zeros(FEATURES, FEATURES)),
    ],
)
def test_a_gradient_that_is_asked_for_later_is_refused_in_words(ask):
    with pytest.raises(PlanError, match=r"settings\.offload: .* its gradient is asked for now"):
        ask(of(stock_of()))


def test_the_memory_of_numbers_is_refused_in_words_and_the_numbers_are_given():
    model = of(stock_of())
    with pytest.raises(PlanError, match="was to be moved to meta"):
        model.to("meta")
    weight = model[0].base.weight
    for ask in (weight.data_ptr, weight.storage, weight.__dlpack__):
        with pytest.raises(PlanError, match=r"the memory of a weight of \(512, 512\) is asked for"):
            ask()
    assert weight.numpy().shape == (FEATURES, FEATURES)
    assert len(weight.tolist()) == FEATURES


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory")
def test_a_folder_in_memory_is_refused_and_the_weights_stay(monkeypatch: pytest.MonkeyPatch):
    model = of(stock_of())
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with pytest.raises(UserError, match=r"/dev/shm lies in memory"):
        results(model)
    monkeypatch.undo()
    assert_same(model, stock_of())


def test_it_is_refused_where_it_cannot_be():
    with pytest.raises(PlanError, match=r"settings\.offload\.kind: these blocks have no weight .* Freeze weights"):
        autotune.apply(Plan(settings=Settings(offload=ON_DISK)), ZOO["mlp"])
    settings = Settings(offload=ON_DISK)
    for other, words in (
        (Compile(kind="model"), "a compiled program keeps the weights"),
        (Parallel(kind="fsdp", processes=2), "several processes share out"),
        (FrozenWeights(kind="8bit"), "as codes in memory"),
        (Checkpointing(kind="selective"), "selective checkpointing"),
    ):
        assert words in (settings.having(other).conflict() or "")
    assert "which is not worth it" in (ON_DISK.unavailable(facts_of(ZOO["frozen"])) or "")
    assert "optimizer may hold" in (ON_DISK.beyond_script() or "")


def found_by(rank: int) -> list[Any]:
    """The state after a step of DDP, of which the second rank begins with other weights."""
    model = of(stock_of())
    with torch.no_grad():
        for parameter in model.parameters() if rank else ():
            parameter.copy_(parameter * 0.5)
    parallel = DistributedDataParallel(model)
    parallel(torch.randn(SAMPLES, FEATURES)).square().mean().backward()
    gradients = [float(one.grad.norm()) for one in model.parameters() if one.requires_grad]
    return [{name: float(one.norm()) for name, one in model.state_dict().items()}, gradients]


@pytest.mark.slow
def test_two_processes_begin_with_the_same_weights(tmp_path: Path):
    """The first's."""
    first, second = found_by_two(__file__, tmp_path)
    assert first == second
    assert first[0] == {name: float(one.norm()) for name, one in stock_of().state_dict().items()}


if __name__ == "__main__":
    run_as_two(found_by)
