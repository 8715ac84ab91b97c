"""Two gloo processes of unlike speed on one CPU, and how fast they train with one split of a batch and with another."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import autotune

from . import unlike_task

__all__ = ["EFFECTIVE", "TASK", "Node", "alternated", "compared", "grouped", "on_both", "seconds"]

TASK, EFFECTIVE = Path(unlike_task.__file__), unlike_task.batch_size


@dataclass(frozen=True)
class Node:
    """Where a process runs: on these processors, as slow as that."""

    processors: frozenset[int]
    sample_s: float

    @contextmanager
    def here(self) -> Iterator[None]:
        """What is started meanwhile runs there."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.processors)
        os.environ[unlike_task.SAMPLE_S] = str(self.sample_s)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def on_both(nodes: Sequence[Node], in_each: Callable[[int, str], dict[str, Any]], folder: str) -> dict[str, Any]:
    """What the first of two processes found, one on each node.

    Args:
        nodes: where they run.
        in_each: is called in each with its rank and the folder.
        folder: for what they tell each other.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_call, args=(in_each, rank, folder)) for rank in range(2)]
    for node, each in zip(nodes, ranks, strict=True):
        with node.here():
            each.start()
    for each in ranks:
        each.join()
        assert each.exitcode == 0, "its traceback stands above"
    found: dict[str, Any] = json.loads(Path(folder, "row.json").read_text())
    return found


def _call(in_each: Callable[[int, str], dict[str, Any]], rank: int, folder: str) -> None:
    row = in_each(rank, folder)
    if rank == 0:
        Path(folder, "row.json").write_text(json.dumps(row))


@contextmanager
def grouped(rank: int, folder: str) -> Iterator[None]:
    """In both processes: they are a group of gloo's as long as the body runs."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    yield
    dist.barrier()
    dist.destroy_process_group()


def alternated(splits: Mapping[str, autotune.Training], num_rounds: int) -> dict[str, float]:
    """Samples per second of each split, at the median of epochs that take turns."""
    rounds: dict[str, list[float]] = {name: [] for name in splits}
    for _ in range(num_rounds):
        for name, training in splits.items():
            rounds[name].append(seconds(training))
    return {name: EFFECTIVE / statistics.median(each) for name, each in rounds.items()}


def compared(per_s: Mapping[str, float], alone_per_s: Sequence[float]) -> dict[str, float]:
    """The gain of ``shared`` over ``even``, and the most that it could be: for speeds alone ``s``, their sum over twice
    the lower one."""
    gain, bound = per_s["shared"] / per_s["even"], sum(alone_per_s) / (2 * min(alone_per_s))
    return {
        "even_per_s": round(per_s["even"], 1),
        "shared_per_s": round(per_s["shared"], 1),
        "gain": round(gain, 4),
        "bound": round(bound, 4),
        "of_bound": round(gain / bound, 4),
    }


def seconds(training: autotune.Training) -> float:
    """Of an optimizer step, at the median of an epoch's without the first."""
    ends = []
    for batch in training.loader:
        if training.step(batch).stepped:
            ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(ends))
