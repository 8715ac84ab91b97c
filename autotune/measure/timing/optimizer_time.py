"""Time that the optimizer's own steps take within a training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .moments import moment, seconds_between


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
