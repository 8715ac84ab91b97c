"""Points in time of a training, by the clock or on a CUDA device's stream, without waiting for the device; and what is
told by them: a clock, what the device does without, and the time of the optimizer's own steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch


def moment(device: torch.device) -> Any:
    """Now; on a CUDA device, once what was asked of it before is done."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """From one :func:`moment` to another of the same device; waits for the latter where it has not come yet."""
    if isinstance(ended, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


class DeviceClock:
    """Tells moments in seconds. Steps are queued on a CUDA device, which may be far behind the host: their time is
    there. It runs from the first moment that is asked for: a script may not have used the device before."""

    def __init__(self) -> None:
        self._last, self._seconds = None, 0.0

    def seconds(self, at: Any) -> float:
        """From the beginning to a moment, which is no earlier than the last one asked for; waits for it."""
        self._seconds += seconds_between(self._last, at) if self._last is not None else 0.0
        self._last = at
        return self._seconds


class Gap:
    """A stretch of a training in which the host has nothing for the device to do."""

    def __init__(self, device: torch.device) -> None:
        """It begins."""
        self._device, self._began_s, self._began = device, perf_counter(), moment(device)
        self._ended: Any = None
        self.host_s = 0.0
        """By the clock."""

    def end(self) -> Gap:
        """It ends here; again, if it turns out to be longer."""
        self.host_s, self._ended = perf_counter() - self._began_s, moment(self._device)
        return self

    def seconds(self) -> float:
        """What the device did without: nothing, as long as it was still at what had been queued."""
        return seconds_between(self._began, self._ended)


class Gaps:
    """Gaps one after another, summed up late, so that nothing waits for the device."""

    def __init__(self) -> None:
        self.num = 0
        """So far."""
        self.host_s = 0.0
        """All of them, by the clock."""
        self._to_read: deque[Gap] = deque()
        self._seconds = 0.0

    def add(self, gap: Gap) -> None:
        """One that has ended."""
        self.num += 1
        self.host_s += gap.host_s
        self._to_read.append(gap)

    def leave_out(self, gap: Gap) -> None:
        """One that was added is none, unless it has been read."""
        if gap in self._to_read:
            self.num -= 1
            self.host_s -= gap.host_s
            self._to_read.remove(gap)

    def seconds(self, num: int) -> float:
        """What the device did without in the first ``num``, no fewer than the last time; waits for the end of them."""
        while self._to_read and self.num - len(self._to_read) < num:
            self._seconds += self._to_read.popleft().seconds()
        return self._seconds


class OptimizerTime:
    """Watches the optimizer of a training. On a CUDA device the moments are events on its stream, so nothing waits."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: that the parameters are on.
        """
        self._device = device
        self._moments: list[Any] = []
        self._depth = 0

    @contextmanager
    def watching(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Count the steps within the body."""
        hooks = (optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def seconds(self) -> float:
        """Seconds of all steps counted."""
        pairs = zip(self._moments[::2], self._moments[1::2], strict=False)
        return math.fsum(seconds_between(began, ended) for began, ended in pairs)

    def _begin(self, *_: Any) -> None:
        """A step that calls its base class's runs the hooks twice."""
        if self._depth == 0:
            self._moments.append(moment(self._device))
        self._depth += 1

    def _end(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._moments.append(moment(self._device))
