"""Two processes that train one model together: memory of each, and time, over one process alone.

    python -m benchmarks.advice --only processes

An optimizer step of two micro-batches: by one process, or a micro-batch by each of two; with ``tensor`` each computes a
part of both. All are on this machine, over gloo, one thread each. Memory is that of one process, time the processors'
that both take.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autotune import Task
from autotune.errors import PlanError
from autotune.techniques.batch import Batch
from tests.gloo_pair import run_as_two

from ..steps import dynamic_peak_bytes, ratios_of, take_turns
from .jobs import JOBS
from .measure import built
from .ranks import batches_of

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("`ddp`", {}),
    "fsdp": ("`fsdp`", {}),
    "no reshard": ("`fsdp`, `reshard: false`", {"kind": "fsdp", "reshard": False}),
    "tensor": ("`tensor`", {}),
}
"""Words, and settings of ``parallel``."""
_ROUNDS = 7


def measure(name: str) -> dict[str, Any]:
    """A row of one job; None is a kind that is refused."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_text(name)
        subprocess.run([sys.executable, "-m", "benchmarks.advice.processes", folder, "2"], check=True)
        found, other = (json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in (0, 1))
    peaks = found["peaks"]
    seconds = {
        key: [one + another for one, another in zip(taken, other["seconds"][key], strict=True)]
        for key, taken in found["seconds"].items()
    }
    ratios = {key: ratios_of(seconds[key], seconds["alone"]) for key in peaks}
    return {
        "part": "processes",
        "model": name,
        "threads": 1,
        "peak_ratio": {key: round(peaks[key] / peaks["alone"], 3) if key in peaks else None for key in KINDS},
        "seconds": {key: [round(one, 4) for one in taken] for key, taken in seconds.items()},
        "time_ratio": {key: round(statistics.median(ratios[key]), 3) if key in peaks else None for key in KINDS},
        "time_spread": {
            key: [round(min(ratios[key]), 3), round(max(ratios[key]), 3)] if key in peaks else None for key in KINDS
        },
        "refused": found["refused"],
    }


class _Alone:
    """An optimizer step of the first process, for which the other waits."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        assert task.build_optimizer is not None, "each job has its own"
        self._model, self._task = model, task
        self._optimizer, self._batches = task.build_optimizer([*model.parameters()]), batches_of(task, 0)

    def __call__(self) -> None:
        for _ in range(2):
            loss = self._task.compute_loss(self._model, next(self._batches)) / 2
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _of_rank(rank: int) -> dict[str, Any]:
    """Peaks, and seconds by turns."""
    task = JOBS[Path(sys.argv[1], "job").read_text()]()
    assert task.batch_size is not None, "each job states it"
    batch = Batch(micro=task.batch_size, accumulate=2)
    steps: dict[str, Callable[[], Any]] = {}
    peaks: dict[str, int] = {}
    refused: dict[str, str] = {}
    if rank == 0:
        alone: list[_Alone] = []

        def prepare() -> None:
            alone.append(_Alone(task.build_model(), task))
            alone[0]()

        peaks["alone"] = dynamic_peak_bytes(lambda: alone[0](), prepare)
        steps["alone"] = _together(alone[0])
    else:
        steps["alone"] = dist.barrier
    dist.barrier()
    for key, (_, row) in KINDS.items():
        settings = {"batch": batch, "parallel": {"kind": key, "processes": 2, **row}}
        try:
            step, peaks[key] = built(settings, task)
        except PlanError as error:
            refused[key] = str(error)
        else:
            steps[key] = _together(step)
    return {"peaks": peaks, "seconds": take_turns(steps, _ROUNDS, time.process_time), "refused": refused}


def _together(step: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        step()
        dist.barrier()

    return run


if __name__ == "__main__":
    torch.manual_seed(0)
    run_as_two(_of_rank)
