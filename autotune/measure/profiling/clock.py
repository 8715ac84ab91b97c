"""``Clock``: how long each module's forward and backward take within a step, without a tracer in the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import nn

from ..timing.moments import moment, seconds_between
from .allocations import Phase
from .module_tracker import Whereabouts
from .watch import Watch, nodes_of


class Clock(Watch):
    """Watches optimizer steps. Use as a context around each step, and :meth:`phase` around each of its parts.

    The time from one hook to the next belongs to the module that was at work: modules are hooked at both ends, and
    each autograd node before it runs. On a CUDA device the moments are events on its stream, so that nothing waits.
    A checkpoint's recomputation is part of backward.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """
        Args:
            model: whose modules are told apart.
            device: that it runs on.
        """
        self._where = Whereabouts(model, self._mark)
        self._device = device
        self._phase = Phase.BEFORE
        self._marks: list[tuple[Phase, str, Any]] = []

    def __enter__(self) -> Self:
        self._marks = []
        self._where.__enter__()
        self._mark()
        return self

    def __exit__(self, *error: object) -> None:
        self._phase = Phase.BEFORE
        self._mark()
        self._where.__exit__(*error)

    def batch(self, batch: Any) -> None:
        """Time spent waiting for data is not any module's."""
        self._phase = Phase.BEFORE
        self._mark()

    @contextmanager
    def phase(self, phase: Phase, loss: Any = None) -> Iterator[None]:
        """Count the time of the body to this phase.

        Args:
            phase: which part of the step it is.
            loss: what backward starts from; the nodes of its graph are hooked.
        """
        if phase == Phase.BACKWARD:
            for node in nodes_of(loss):
                node.register_prehook(partial(self._begin, self._where.of_node(node)))
        self._phase = phase
        self._mark()
        yield
        self._phase = Phase.BEFORE
        self._mark()

    def seconds(self) -> Mapping[Phase, Mapping[str, float]]:
        """Seconds of each module by phase, without those of its children."""
        found: defaultdict[Phase, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (phase, module, began), (_, _, ended) in pairwise(self._marks):
            found[phase][module] += seconds_between(began, ended)
        return found

    def _begin(self, module: str, gradients: Any) -> None:
        self._mark(module)

    def _mark(self, module: str | None = None) -> None:
        now = moment(self._device)
        self._marks.append((self._phase, module if module is not None else self._where.now()[0], now))
