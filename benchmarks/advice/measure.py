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
from autotune.plan import Budget, Inference
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.units import MIB

from ..steps import dynamic_peak_bytes, ratios_of, take_turns
from .edits import Edit
from .jobs import JOBS
from .known import ADVICE, Advice

_ROUNDS = 3
"""Of a step of each."""


class OptimizerStep:
    """An optimizer step of a job, or its pass in inference, with the samples that its loader yields."""

    def __init__(self, plan: Plan, task: Task) -> None:
        self.training: Any = autotune.apply(plan, task)
        self._run = self.training.step if plan.inference is None else self.training.infer
        self._batches = self._endless()

    def __call__(self) -> None:
        for _ in range(self.training.batch.accumulate):
            self._run(next(self._batches))

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
        self._stock: dict[Any, tuple[OptimizerStep, int]] = {}
        """The last that was built, by what it has of its own."""

    def measure(self, key: str) -> dict[str, Any]:
        """A row: one piece of advice beside the stock step."""
        advice = ADVICE[key]
        own = (advice.of_both, advice.optimizer, advice.infers)
        if own not in self._stock:
            self._stock.clear()
            self._stock[own] = built({"batch": Batch(micro=self._size)}, self._task_of(advice, advice.of_both))
        batch = advice.batch(self._size)
        stock, stock_peak = self._stock[own]
        task = self._task_of(advice, advice.of_both, advice.edit)
        advised, peak = built({"batch": batch, **advice.settings}, task)
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

    def _task_of(self, advice: Advice, *edits: Edit | None) -> Task:
        """The task with what torch's own calls do to its model, with the optimizer and of the kind that both have."""

        def build_model() -> nn.Module:
            model = self._task.build_model()
            for edit in edits:
                if edit is not None:
                    edit(model)
            return model

        build_optimizer = advice.optimizer or self._task.build_optimizer
        task = dataclasses.replace(
            self._task, build_model=build_model, build_optimizer=build_optimizer, infer=self._task.compute_loss
        )
        return task.for_inference() if advice.infers else task


def built(settings: dict[str, Any], task: Task) -> tuple[OptimizerStep, int]:
    """The step, and all its tensors at their peak, those included that the training holds between steps."""
    found: list[OptimizerStep] = []
    inference = Inference(tolerance=0.05) if task.infers else None
    plan = Plan(settings=Settings.model_validate(settings), budget=Budget(device="cpu"), inference=inference)

    def prepare() -> None:
        found.append(OptimizerStep(plan, task))
        found[0]()
        gc.collect()

    gc.collect()  # what others have left is not freed in there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a batch that is another, on purpose
        peak = dynamic_peak_bytes(lambda: found[0](), prepare)
    return found[0], peak
