"""Out of memory in one of two processes: both halve, and train on as they would have."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pair import run_as_two
from test_halving import Limited
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import TensorDataset

import autotune
from autotune.errors import PlanError
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.parallel import Parallel
from autotune.techniques.support.replica import within

DDP, FSDP = Parallel(kind="ddp", processes=2), Parallel(kind="fsdp", processes=2)
NUM_STEPS = 4
WHOLE, HALF = Batch(micro=4, accumulate=4), Batch(micro=2, accumulate=8)
"""Of 16 samples; of each process, two micro-batches and four."""


class Net(nn.Module):
    """Two layers, with what runs out of memory in between."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), norm or nn.Identity(), nn.Linear(8, 1)
        self.limit: Callable[[Tensor], Tensor] = lambda hidden: hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.limit(self.norm(self.first(x))))


class Device:
    """A loss, with memory for so many samples from the n-th pass on."""

    def __init__(self, most: int = 10**9, begins_at: int = 0, in_backward: bool = False, counts: bool = False) -> None:
        self.most, self.begins_at, self.in_backward, self.counts = most, begins_at, in_backward, counts
        self.passes: list[int] = []

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        self.passes.append(len(x))
        within(model).limit = self.limit
        errors = (model(x) - y) ** 2
        if not self.counts:
            return errors.mean()
        kept = y[:, 0] > 0  # as many as there are, which differs from rank to rank
        return errors[kept].sum(), kept.sum()

    def limit(self, hidden: Tensor) -> Tensor:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        most = self.most if len(self.passes) > self.begins_at else 10**9
        if self.in_backward:
            return Limited.apply(hidden, most, error)
        if len(hidden) > most:
            raise error
        return hidden


def normed() -> nn.Module:
    return Net(nn.BatchNorm1d(8))


def synced() -> nn.Module:
    return Net(nn.SyncBatchNorm(8))


class NoRoom(TorchFunctionMode):
    """Memory runs out, once, where as many values are to lie in one tensor as the model has: in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.values = sum(p.numel() for p in Net().parameters())
        self.num_asked = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (torch.cat, torch.empty) and found.numel() == self.values:
            self.num_asked += 1
            if self.num_asked == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 196 bytes.")
        return found


def in_exchange(rank: int) -> dict[str, Any]:
    device = Device()
    with NoRoom() if rank else contextlib.nullcontext():
        return trained(training(device)) | {"passes": device.passes}


def too_late(rank: int) -> str:
    """Memory runs out in the second process after the exchange, in the task's own ``after_backward``."""

    def after_backward(model: nn.Module) -> None:
        if rank:
            raise torch.OutOfMemoryError("CUDA out of memory. Mine.")

    return _said(lambda: trained(training(Device(), after_backward=after_backward)), RuntimeError)


def training(
    loss: Any,
    batch: Batch = WHOLE,
    parallel: Parallel = DDP,
    halve: bool = True,
    model: Any = Net,
    calm_steps: int = 100,
    **more: Any,
):
    data = TensorDataset(*torch.randn(16 * NUM_STEPS, 5, generator=torch.Generator().manual_seed(1)).split([4, 1], 1))
    task = autotune.Task(
        build_model=model,
        build_dataset=lambda: data,
        compute_loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        batch_size=16,
        max_grad_norm=0.5,
        **more,
    )
    plan = Plan(settings=Settings(batch=batch, parallel=parallel))
    return autotune.apply(plan, task, halve_when_out_of_memory=halve, calm_steps=calm_steps)


def trained(one: Any) -> dict[str, Any]:
    """Of each optimizer step the loss over all ranks; then the parameters, and what was told."""
    losses, totals = [], torch.zeros(2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in one.loader:
            result = one.step(batch)
            totals += torch.tensor([float(result.loss) * result.weight, result.weight])
            if result.stepped:
                if dist.is_initialized():
                    dist.all_reduce(totals)
                losses.append(float(totals[0] / totals[1]))
                totals = torch.zeros(2)
    state = one.model.state_dict()
    return {
        "losses": losses,
        "state": {name: values.flatten().tolist() for name, values in state.items()},
        "halved": one.times_halved,
        "batch": [one.batch.micro, one.batch.accumulate],
        "told": [str(one.message) for one in told if "out of memory" in str(one.message)],
    }


CASES: dict[str, dict[str, Any]] = {
    "in the first forward": {"begins_at": 0},
    "in a step's first backward": {"begins_at": 4, "in_backward": True},
    "in a step's last forward": {"begins_at": 5},
    "in a step's last backward": {"begins_at": 5, "in_backward": True},
    "with counts": {"begins_at": 5, "counts": True},
}
"""What runs out of memory for more than two samples, in the second process; there, in the third step."""


def in_case(rank: int, name: str) -> dict[str, Any]:
    device = Device(most=2 if rank else 10**9, **CASES[name])
    return trained(training(device)) | {"passes": device.passes}


def in_both(rank: int) -> dict[str, Any]:
    device = Device(most=2 if rank else 1, begins_at=5)
    return trained(training(device)) | {"passes": device.passes}


def growing_back(rank: int) -> dict[str, Any]:
    """A neighbour of the second process's takes memory in the first pass, and has gone after it."""
    device = Device(most=2 if rank else 10**9)

    def crowded(model: nn.Module, batch: Any) -> Any:
        if device.passes:
            device.most = 10**9
        return device(model, batch)

    return trained(training(crowded, calm_steps=1)) | {"passes": device.passes}


def of_one_sample(rank: int) -> str:
    return _said(lambda: trained(training(Device(most=0 if rank else 10**9, begins_at=2))), torch.OutOfMemoryError)


def refused(parallel: Parallel = DDP, model: Any = Net) -> str:
    return _said(lambda: training(Device(), parallel=parallel, model=model), PlanError)


def _said(act: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        act()
    except kind as error:
        return "\n".join((str(error), *getattr(error, "__notes__", ())))
    return ""


def found_by(rank: int) -> dict[str, Any]:
    found = {
        "stock": trained(training(Device(), halve=False)),
        "calm": trained(training(Device())),
        "normed": [trained(training(Device(), halve=halve, model=normed)) for halve in (False, True)],
        "cases": {name: in_case(rank, name) for name in CASES},
        "both": in_both(rank),
        "growing": growing_back(rank),
        "exchange": in_exchange(rank),
        "one sample": of_one_sample(rank),
        "refused": {"fsdp": refused(FSDP), "SyncBatchNorm": refused(model=synced)},
    }
    found["too late"] = too_late(rank)  # the last: afterwards they have nothing in common
    return found


def alone(batch: Batch, loss: Any) -> dict[str, Any]:
    return trained(training(loss, batch, Parallel(), halve=False))


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["losses"]) == len(expected["losses"]) == NUM_STEPS
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for name, values in found["state"].items():
        assert values == pytest.approx(expected["state"][name], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_both_halve_and_train_as_they_would_have_with_half_the_micro_batch(pair, name):
    """As many optimizer steps, of the same losses; from then on each pass sees two samples, in both processes."""
    first, second = (one["cases"][name] for one in pair)
    assert first["state"] == second["state"]
    assert (first["halved"], first["batch"]) == (second["halved"], second["batch"]) == (1, [2, 4])
    assert_alike(first, alone(HALF, Device(counts="counts" in CASES[name])))
    last = (max(i for i, passed in enumerate(one["passes"]) if passed == 4) for one in (first, second))
    assert all(set(one["passes"][at + 1 :]) == {2} for one, at in zip((first, second), last, strict=True))


@pytest.mark.slow
def test_it_is_told_once_with_who_ran_out(pair):
    first, second = (one["cases"]["in a step's last backward"]["told"] for one in pair)
    (said,) = first
    assert "out of memory (process 1: CUDA out of memory. Tried to allocate 2.00 GiB.)" in said
    assert "takes 2 samples in place of 4" in said
    assert second == []


@pytest.mark.slow
def test_the_passes_of_the_step_are_made_again(pair):
    """Two whole steps, the third up to its end in the first process and up to its fault in the second, and again."""
    first, second = (one["cases"]["in a step's last forward"]["passes"] for one in pair)
    assert first == [4] * 6 + [2] * 8
    assert second == [4] * 6 + [2] * 8
    early = [one["cases"]["in a step's first backward"]["passes"] for one in pair]
    assert early == [[4] * 6 + [2] * 8, [4] * 5 + [2] * 8]


def test_both_may_run_out_and_again(pair):
    """The first fits one sample, the second two: both take one."""
    for one in pair:
        assert (one["both"]["halved"], one["both"]["batch"]) == (2, [1, 8])
    assert pair[0]["both"]["state"] == pair[1]["both"]["state"]
    assert_alike(pair[0]["both"], alone(HALF, Device()))


def test_both_grow_back_together(pair):
    """After one calm step: the first has halves, the others are whole, and it trains as with halves all along."""
    for one, tried in zip(pair, ([4, 4], [4]), strict=True):
        found = one["growing"]
        assert (found["halved"], found["batch"]) == (0, [4, 2])
        assert found["passes"] == [*tried, *[2] * 4, *[4] * 2 * (NUM_STEPS - 1)]
        assert_alike(found, pair[0]["stock"])


def test_without_a_fault_it_trains_as_distributed_data_parallel_does(pair):
    """BatchNorm's statistics too, which are the first process's in both."""
    for one in pair:
        assert_alike(one["calm"], one["stock"])
        assert one["calm"]["halved"] == 0
    stock, mine = pair[0]["normed"]
    assert_alike(mine, stock)
    assert pair[1]["normed"][1]["state"] == mine["state"]


def test_out_of_memory_where_gradients_are_exchanged_is_agreed_on_as_well(pair):
    """The memory for it is taken before the ranks agree, so that none waits in it for one that has none left."""
    first, second = (one["exchange"] for one in pair)
    assert first["state"] == second["state"]
    assert (first["halved"], first["batch"]) == (second["halved"], second["batch"]) == (1, [2, 4])
    assert first["passes"] == second["passes"] == [4] * 6 + [2] * 8
    assert "process 1: CUDA out of memory. Tried to allocate 196 bytes." in first["told"][0]
    assert_alike(first, alone(HALF, Device()))


def test_out_of_memory_once_the_others_go_on_ends_the_rank(pair):
    """It does not wait to agree with ranks that have agreed already; they lose their connection to it."""
    first, second = (one["too late"] for one in pair)
    assert "CUDA out of memory. Mine." in second
    assert "memory ran out once the processes had agreed that it had not" in second
    assert first != ""
    assert "CUDA out of memory" not in first


def test_what_cannot_be_helped_ends_both_with_the_reason(pair):
    for one in pair:
        assert "CUDA out of memory" in one["one sample"]
        assert "autotune: the micro-batch cannot be halved: one sample does not fit." in one["one sample"]


@pytest.mark.parametrize("what", ["fsdp", "SyncBatchNorm"])
def test_what_exchanges_data_within_a_pass_is_refused(pair, what):
    for one in pair:
        assert f"{what} exchanges data between ranks within forward and backward passes" in one["refused"][what]


if __name__ == "__main__":
    run_as_two(found_by, meet_again=False)
