"""``Steps``: runs optimizer steps one after another; losses are read only when the device is synchronized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

from ..data.positions import Position
from ..training.training import Training
from .errors import NonFiniteLoss
from .feed import Feed, repeated
from .timing.compile_time import CompileTime
from .timing.engine import Reading


class Step(NamedTuple):
    """One optimizer step."""

    num_samples: int
    """Samples it consumed, of all ranks."""
    skipped: bool
    """Whether the loss scaler found infinite gradients."""


class Steps:
    """Drives a training over its own loader, and meters it."""

    decides_together = True

    def __init__(self, training: Training, num_steps: int = 0, note: Callable[[int], None] = lambda step: None) -> None:
        """
        Args:
            training: what to run.
            num_steps: optimizer steps taken before, so that steps are counted from the process's first.
            note: called with the number of steps, outside of what is timed.
        """
        self.training = training
        self._note = note
        self.feed = Feed(training.loader)
        self.num_steps = num_steps
        self.compile_time = CompileTime()
        self._num_samples = 0
        self._losses: list[tuple[int, torch.Tensor]] = []

    @property
    def num_ahead(self) -> int:
        """Batches that loader workers may have ready."""
        options = self.training.loader.options
        return int(options["num_workers"] * (options["prefetch_factor"] or 0))

    def read(self) -> Reading:
        """Now, as a :class:`~autotune.measure.timing.engine.Meter` tells."""
        return Reading(
            perf_counter(),
            process_time(),
            self.feed.between_s,
            self.compile_time.seconds(),
            self.feed.wait_s,
            self._num_samples,
            self.num_steps,
        )

    def at_edge(self) -> None:
        """Between windows."""
        self._note(self.num_steps)

    def step(self) -> Step:
        """One whole optimizer step."""
        return self._step(self.feed.step())

    def repeat(self, batch: Any) -> None:
        """One optimizer step whose micro-batches are all this one."""
        self._step(repeated(self.training.loader, batch))

    def settle(self) -> None:
        """Synchronize the device, and check the losses since the last time.

        Raises:
            NonFiniteLoss: one of them is NaN or infinite.
        """
        if self.training.device.type == "cuda":
            torch.cuda.synchronize(self.training.device)
        if not self._losses:
            return
        values = torch.stack([loss for _, loss in self._losses])
        if not bool(values.isfinite().all()):
            step, value = next((n, float(v)) for (n, v) in self._losses if not v.isfinite())
            raise NonFiniteLoss(step, value)
        self._losses.clear()

    def _step(self, micro_batches: Iterator[tuple[Any, Position]]) -> Step:
        self.num_steps += 1
        num_samples = 0
        for batch, position in micro_batches:
            result = self.training.step(batch)
            num_samples += position.num_samples
            if result.weight:  # a micro-batch that counts for nothing has no mean
                self._losses.append((self.num_steps, result.loss.float().reshape(())))
        step = Step(position.step_samples or num_samples * self.training.loader.ranks.size, not result.stepped)
        self._num_samples += step.num_samples
        return step
