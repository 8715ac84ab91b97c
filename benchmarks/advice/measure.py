"""An optimizer step as advised beside the stock step: all tensors at the peak, and the time a sample.

Time is the processor's, which others on the machine disturb less; with another loader or a disk, it is the clock's.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import autotune
from autotune import Plan, Task
from autotune.plan import Budget
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.units import MIB

from ..steps import dynamic_peak_bytes, ratios_of, take_turns
from .jobs import JOBS
from .known import ADVICE, Edit

_ROUNDS = 3
"""Of a step of each."""


class OptimizerStep:
    """An optimizer step of a job, with the samples that its loader yields."""

    def __init__(self, plan: Plan, task: Task) -> None:
        self.training = autotune.apply(plan, task)
        self._batches = self._endless()

    def __call__(self) -> None:
        for _ in range(self.training.batch.accumulate):
            self.training.step(next(self._batches))

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.training.loader


class Job:
    """One of the six, with its stock steps, which several pieces of advice are measured beside."""

    def __init__(self, name: str) -> None:
        self.name = name
        task = JOBS[name]()
        dataset, size = task.build_dataset(), task.batch_size
        assert size is not None, "each job states it"
        self._size = size
        self._task = dataclasses.replace(task, build_dataset=lambda: dataset)  # in memory before: part of no peak
        self._stock: dict[Edit | None, tuple[OptimizerStep, int]] = {}

    def measure(self, key: str) -> dict[str, Any]:
        """A row: one piece of advice beside the stock step."""
        advice = ADVICE[key]
        edit = advice.of_both
        if edit not in self._stock:
            self._stock[edit] = _built({"batch": Batch(micro=self._size)}, _edited(self._task, edit))
        batch = advice.batch(self._size)
        stock, stock_peak = self._stock[edit]
        advised, peak = _built({"batch": batch, **advice.settings}, _edited(self._task, edit, advice.edit))
        steps = {"stock": stock, "advised": advised}
        clock = time.perf_counter if {"data_loading", "offload"} & advice.settings.keys() else time.process_time
        seconds = take_turns(steps, _ROUNDS, clock)
        samples = batch.num_samples / self._size
        ratios = [ratio / samples for ratio in ratios_of(seconds["advised"], seconds["stock"])]
        return {
            "part": "step",
            "advice": key,
            "model": self.name,
            "threads": torch.get_num_threads(),
            "peak_mib": {"stock": round(stock_peak / MIB, 1), "advised": round(peak / MIB, 1)},
            "peak_ratio": round(peak / stock_peak, 3),
            "seconds": {which: [round(one, 4) for one in taken] for which, taken in seconds.items()},
            "time_ratio": round(statistics.median(ratios), 3),
            "time_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        }


def _edited(task: Task, *edits: Edit | None) -> Task:
    """The task with what torch's own calls do to its model."""

    def build_model() -> nn.Module:
        model = task.build_model()
        for edit in edits:
            if edit is not None:
                edit(model)
        return model

    return dataclasses.replace(task, build_model=build_model)


def _built(settings: dict[str, Any], task: Task) -> tuple[OptimizerStep, int]:
    """The step, and all its tensors at their peak, those included that the training holds between steps."""
    found: list[OptimizerStep] = []
    plan = Plan(settings=Settings.model_validate(settings), budget=Budget(device="cpu"))

    def prepare() -> None:
        found.append(OptimizerStep(plan, task))
        found[0]()
        gc.collect()

    gc.collect()  # what others have left is not freed in there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a batch that is another, on purpose
        peak = dynamic_peak_bytes(lambda: found[0](), prepare)
    return found[0], peak
