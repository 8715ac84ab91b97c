"""``Steps``: runs optimizer steps one after another; losses are read only when the device is synchronized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..data.positions import Position
from ..training.training import Training
from .errors import NonFiniteLoss
from .feed import Feed, repeated
from .timing.compile_time import CompileTime

__all__ = ["Step", "Steps"]


class Step(NamedTuple):
    """One optimizer step."""

    num_samples: int
    """Samples it consumed, of all ranks."""
    skipped: bool
    """Whether the loss scaler found infinite gradients."""


class Steps:
    """Drives a training over its own loader."""

    def __init__(self, training: Training, num_steps: int = 0) -> None:
        """
        Args:
            training: what to run.
            num_steps: optimizer steps taken before, so that steps are counted from the process's first.
        """
        self.training = training
        self.feed = Feed(training.loader)
        self.num_steps = num_steps
        self.compile_time = CompileTime()
        self._losses: list[tuple[int, torch.Tensor]] = []

    @property
    def aside_s(self) -> float:
        """Seconds so far that belong to no step: between epochs, and for compiling."""
        return self.feed.between_s + self.compile_time.seconds()

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
        return Step(position.step_samples or num_samples * self.training.loader.ranks.size, not result.stepped)
