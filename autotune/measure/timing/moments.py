"""Points in time of a training, by the clock or on a CUDA device's stream, without waiting for the device; and the time
between two of them that the optimizer's own steps take."""

from __future__ import annotations

import math
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
        hooks = (
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        )
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
