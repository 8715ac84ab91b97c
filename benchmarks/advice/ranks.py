"""Gradients that two processes exchange in fewer bytes, by torch's own hooks: bytes, time and losses over DDP's own.

    python -m benchmarks.advice --only ranks

Both processes are on this machine, over gloo: bytes hold anywhere, times for a network as fast as memory. Each
bucket's exchange is waited for: with several at once, torch 2.13's PowerSGD fails over gloo, whose ranks exchange them
in unlike order.
"""

import copy
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from autotune import Task
from tests.gloo_pair import run_as_two

from ..steps import ratios_of, take_turns
from .jobs import JOBS

HOOKS = {"fp16": "gradients in fp16", "powerSGD": "PowerSGD, rank 4", "top": "largest 1 %, rest kept"}
_STEPS, _SETTLED = 60, 10
_RANK, _PART = 4, 0.01
_Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


def _waits(hook: _Hook) -> _Hook:
    def waited(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        found = hook(state, bucket)
        found.wait()
        return found

    return waited


class Largest:
    """The largest elements of a bucket and their places; what is left of a gradient is added to the next one's.

    Source: Aji and Heafield 2017, arXiv:1704.05021
    """

    def __init__(self) -> None:
        self._left: dict[int, Tensor] = {}

    def hook(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The mean over processes of what each has chosen."""
        whole = bucket.buffer()
        left = self._left.get(bucket.index())
        if left is not None and left.shape == whole.shape:  # torch rebuilds its buckets after the first step
            whole.add_(left)
        places = whole.abs().topk(max(1, int(_PART * whole.numel()))).indices
        values = whole[places]
        self._left[bucket.index()] = whole.index_fill(0, places, 0)
        found = [(torch.empty_like(places), torch.empty_like(values)) for _ in range(dist.get_world_size())]
        dist.all_gather([one for one, _ in found], places)
        dist.all_gather([one for _, one in found], values)
        whole.zero_()
        for theirs, of in found:
            whole.index_add_(0, theirs, of, alpha=1 / len(found))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(whole)
        return done


def measure(name: str) -> dict[str, Any]:
    """A row of one job: each hook beside the exchange of whole gradients."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_text(name)
        subprocess.run([sys.executable, "-m", "benchmarks.advice.ranks", folder, "2"], check=True)
        found = json.loads(Path(folder, "rank-0.json").read_text())
    seconds = found["seconds"]
    ratios = {key: ratios_of(taken[_SETTLED:], seconds["whole"][_SETTLED:]) for key, taken in seconds.items()}
    last = {key: statistics.mean(losses[-_SETTLED:]) for key, losses in found["losses"].items()}
    return {
        "part": "ranks",
        "model": name,
        "threads": 1,
        "bytes_ratio": {key: round(found["bytes"][key], 4) for key in HOOKS},
        "time_ratio": {key: round(statistics.median(ratios[key]), 3) for key in HOOKS},
        "time_spread": {key: [round(value, 3) for value in _middle(ratios[key])] for key in HOOKS},
        "first_loss": round(found["losses"]["whole"][0], 4),
        "last_loss": {key: round(loss, 4) for key, loss in last.items()},
    }


def _middle(ratios: list[float]) -> tuple[float, float]:
    """Between which the middle four fifths are."""
    tenths = statistics.quantiles(ratios, n=10)
    return tenths[0], tenths[-1]


def _of_rank(rank: int) -> dict[str, Any]:
    """Each hook trains a copy of the model on the same samples; their steps take turns."""
    task = JOBS[Path(sys.argv[1], "job").read_text()]()
    torch.manual_seed(0)
    model = task.build_model()
    power = PowerSGDState(None, matrix_approximation_rank=_RANK, start_powerSGD_iter=2)
    hooks: dict[str, tuple[Any, _Hook]] = {
        "whole": (None, allreduce_hook),
        "fp16": (None, fp16_compress_hook),
        "powerSGD": (power, powerSGD_hook),
        "top": (None, Largest().hook),
    }
    steps = {key: _Step(copy.deepcopy(model), task, state, hook, rank) for key, (state, hook) in hooks.items()}
    seconds = take_turns(steps, _STEPS)
    sent = power.total_numel_after_compression / power.total_numel_before_compression
    return {
        "seconds": seconds,
        "losses": {key: step.losses for key, step in steps.items()},
        # a place is of 8 bytes and a value of 4; each process has those of both
        "bytes": {"fp16": 0.5, "powerSGD": sent, "top": _PART * (8 + 4) / 4},
    }


class _Step:
    """An optimizer step of both processes."""

    def __init__(self, model: nn.Module, task: Task, state: Any, hook: _Hook, rank: int) -> None:
        self._replica = DistributedDataParallel(model)
        self._replica.register_comm_hook(state, _waits(hook))
        self._task = task
        assert task.build_optimizer is not None, "each job has its own"
        self._optimizer = task.build_optimizer([*model.parameters()])
        self._batches = batches_of(task, rank)
        self.losses: list[float] = []

    def __call__(self) -> None:
        torch.manual_seed(len(self.losses))
        loss = self._task.compute_loss(self._replica, next(self._batches))
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        both = loss.detach().clone()
        dist.all_reduce(both)
        self.losses.append(float(both) / dist.get_world_size())


def batches_of(task: Task, rank: int) -> Iterator[Any]:
    dataset, size = task.build_dataset(), task.batch_size
    assert size is not None, "each job states it"
    for first in itertools.count(rank * size, 2 * size):
        places = [number % len(dataset) for number in range(first, first + size)]  # type: ignore[arg-type]
        yield torch.utils.data.default_collate([dataset[number] for number in places])


if __name__ == "__main__":
    run_as_two(_of_rank)
