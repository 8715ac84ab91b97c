"""``Steps``: runs optimizer steps one after another, and meters them without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

from ..data.positions import Position
from ..ranks import of_first
from ..training.training import Training
from .errors import NonFiniteLoss
from .feed import Feed, largest, repeated
from .losses import Losses
from .timing.compile_time import CompileTime
from .timing.engine import Reading
from .timing.moments import DeviceClock, moment


class Step(NamedTuple):
    """One optimizer step."""

    num_samples: int
    """Samples it consumed, of all ranks."""
    took_step: bool | torch.Tensor
    """Whether the optimizer stepped, on the device where only that knows."""

    @property
    def skipped(self) -> bool:
        """Whether the loss scaler found infinite gradients; may wait for the device."""
        return not self.took_step


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
        self._losses = Losses()
        self._clock = DeviceClock()

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
            self.feed.starts.host_s,
            self.compile_time.seconds(),
            self.feed.waits.host_s,
            self._num_samples,
            self.num_steps,
        )

    def mark(self) -> Callable[[], Reading]:
        """As :meth:`read`, once the device has come here; by its clock.

        Raises:
            NonFiniteLoss: from what is returned: a loss until then is NaN or infinite.
        """
        losses = self._losses.look()
        at, now = moment(self.training.device), self.read()
        num_starts, num_waits = self.feed.starts.num, self.feed.waits.num

        def reading() -> Reading:
            seconds = self._clock.seconds(at)
            _check(losses())
            starts_s, waits_s = self.feed.starts.seconds(num_starts), self.feed.waits.seconds(num_waits)
            return now._replace(device_s=seconds, between_s=starts_s, wait_s=waits_s)

        return reading

    def at_edge(self) -> None:
        """Between windows."""
        self._note(self.num_steps)

    def step(self) -> Step:
        """One whole optimizer step."""
        return self._step(self.feed.step())

    def repeat(self, batch: Any, num_samples: int | None = None) -> None:
        """One optimizer step whose micro-batches are all this one, of so many samples if not of as many as ever."""
        self._step(repeated(self.training.loader, batch, num_samples=num_samples))

    def in_order(self, num_batches: int, limit_s: float) -> Any:
        """Train on the next so many micro-batches, or on those that an epoch has, as a job trains on them, until the
        time is over; the largest of them, None where there was no time."""
        began_s, last = perf_counter(), self.feed.num_batches + num_batches
        found: list[Any] = []

        def watched() -> Iterator[tuple[Any, Position]]:
            for batch, position in self.feed.step():
                found[:] = [largest([*found, batch])]
                yield batch, position

        while of_first(
            not self.feed.has_restarted and self.feed.num_batches < last and perf_counter() - began_s < limit_s
        ):
            self._step(watched())
        return found[0] if found else None

    def largest_of(self, num_batches: int, limit_s: float) -> Any:
        """The largest of the next so many micro-batches, or of those that an epoch has: trained on as far as there is
        time, the others only looked at."""
        last = self.feed.num_batches + num_batches
        found = [one for one in (self.in_order(num_batches, limit_s),) if one is not None]
        if self.feed.num_batches < last and not self.feed.has_restarted:
            found.append(self.feed.largest_of(last - self.feed.num_batches))
        return largest(found)

    def settle(self) -> None:
        """Synchronize the device, and check the losses since the last time.

        Raises:
            NonFiniteLoss: one of them is NaN or infinite.
        """
        losses = self._losses.look()
        if self.training.device.type == "cuda":
            torch.cuda.synchronize(self.training.device)
        _check(losses())

    def _step(self, micro_batches: Iterator[tuple[Any, Position]]) -> Step:
        self.num_steps += 1
        num_samples = 0
        for batch, position in micro_batches:
            result = self.training.step(batch)
            num_samples += position.num_samples
            self._losses.add(self.num_steps, result.loss, result.count)
        step = Step(position.step_samples or num_samples * self.training.loader.ranks.size, result.took_step)
        self._num_samples += step.num_samples
        return step


def _check(losses: list[tuple[int, float]]) -> None:
    for step, loss in losses:
        if not math.isfinite(loss):
            raise NonFiniteLoss(step, loss)
