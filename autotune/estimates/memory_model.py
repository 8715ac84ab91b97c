"""``MemoryModel``: the memory model of an optimizer step, from its allocations at three batches, or at each of a few.

Each allocation's size is affine in the batch, or nearly so. The peak is not, since it moves from one moment of the step
to another. So the sizes are extended to the batch that is asked for, and the step's allocations and frees are replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from ..layers.saved_by import SharedSavers
from ..measure.profiling.allocations import Phase, Trace
from ..plan import Plan
from ..task import Task
from .tracing.fake_ops import Target
from .tracing.fake_step import FakeTraining, TracedStep, Unlike
from .tracing.work import Work, total_work, work_between
from .types import Interval, Largest

BATCHES = (2, 3, 256)
"""Micro-batches that are traced. Not 1, at which some tensors are contiguous that otherwise are not (it is traced
itself where it is asked for). One is large enough for code that works in pieces to do so."""
_ERROR = 0.03
"""Relative error of the tensors' peak, for kernels' workspace. Of measured peaks of models that this was not developed
on, at most 5 % are to lie above; ``python -m benchmarks.estimate`` counts them."""
_WORKSPACE_ERROR = 0.05
"""The same on a CPU where there are convolutions or recurrent layers, of whose workspace only a part is known: 168
peaks of 7 models with convolutions were predicted 4.7 % off at the 95th percentile, and one lay above the interval
(``python -m benchmarks.estimate --kept``)."""
_LARGER = (24, 36, 256)
"""Batches taken instead where the first do not correspond, since a layer takes another kernel at small batches; smaller
ones are traced themselves."""
_STRAIGHT = 0.01
"""Relative distance from the line that the third point of a size may have: bits are rounded up to bytes."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """Bytes of each allocation as a function of the micro-batch, fitted to three batches."""

    batches: tuple[int, ...]
    """Three, ascending."""
    num_bytes: np.ndarray
    """(3, allocations): at each."""

    def at(self, batch: int) -> np.ndarray:
        """(allocations,): bytes at a micro-batch. On the line through all three points where they lie on one. If the
        third is below the line of the first two, that line up to the third point, as for code that works in pieces; if
        it is above, the parabola through all three."""
        (first, second, third), (a, b, c) = self.batches, self.num_bytes
        line = a + (b - a) * (batch - first) / (second - first)
        bend = c - (a + (b - a) * (third - first) / (second - first))
        straight = a + (c - a) * (batch - first) / (third - first)
        curved = line + bend / ((third - first) * (third - second)) * (batch - first) * (batch - second)
        bent = np.where(bend < 0, np.minimum(line, c), curved)
        found = np.where(abs(bend) <= _STRAIGHT * c, straight, bent)
        whole: np.ndarray = np.maximum(0, np.rint(found)).astype(np.int64)
        return whole


@dataclass(frozen=True, eq=False)
class MemoryModel:
    """The memory model of an optimizer step: its allocations and its peak at any micro-batch."""

    steps: tuple[TracedStep, ...]
    """Traced steps at three batches; the order of events is the last one's. Empty where few batches are asked for."""
    trace_step: Callable[[int], TracedStep]
    """Traces the step at another batch."""
    batches: tuple[int, ...] = BATCHES
    """Batches of the traced steps, ascending."""
    target: Target = "cpu"
    """The device that is planned for."""

    @cached_property
    def is_traced_at_each_batch(self) -> bool:
        """Whether every batch that is asked for is traced itself, which is exact: where few are asked for, and where
        the allocations of two do not correspond, as in a forward that loops over the batch."""
        return not self.steps or not corresponds(*self.steps)

    def at(self, batch: int) -> Trace:
        """The step's allocations at a micro-batch >= 1.

        Raises:
            Untraceable: this batch had to be traced, and could not be.
        """
        if self.is_traced_at_each_batch or batch < self.batches[0]:
            return self.trace_step(batch).trace
        last = self.steps[-1].trace
        sized = zip(last.allocations, self._sizes.at(batch).tolist(), strict=True)
        return replace(last, allocations=tuple(replace(one, num_bytes=num_bytes) for one, num_bytes in sized))

    def peak_bytes(self, batch: int) -> int:
        """Most bytes alive at once at a micro-batch >= 1."""
        if self.is_traced_at_each_batch or batch < self.batches[0]:
            return self.trace_step(batch).trace.peak_bytes()
        numbers, signs = self._events
        return int(np.cumsum(signs * self._sizes.at(batch)[numbers]).max())

    def work(self, batch: int) -> tuple[Work, Work]:
        """Work of forward and backward together, and of the optimizer, in one step at a micro-batch."""
        if not self.steps:
            return total_work(self.trace_step(batch).work)
        first, *_, last = self.steps
        return work_between((self.batches[0], self.batches[-1]), (first.work, last.work), batch)

    def possible_bytes(self, batch: int) -> int:
        """Most that one kernel may take for itself at a micro-batch, beside what is known: in proportion to it."""
        if not self.steps:
            return self.trace_step(batch).possible_bytes
        return round(self.steps[-1].possible_bytes * batch / self.batches[-1])

    def host_bytes(self, batch: int) -> int:
        """What is in the host's memory of a card: what a step saves there is in proportion to the micro-batch."""
        step = self.steps[-1] if self.steps else self.trace_step(batch)
        share = batch / self.batches[-1] if self.steps else 1
        return step.host_kept_bytes + round(step.host_bytes * share)

    def interval(self, batch: int) -> Interval:
        """The peak with its interval: at most one in twenty is to be above."""
        step = self.steps[-1] if self.steps else self.trace_step(batch)
        has_workspace = self.target == "cpu" and any(one.is_scratch for one in step.trace.allocations)
        return Interval.around(self.peak_bytes(batch), _WORKSPACE_ERROR if has_workspace else _ERROR)

    def largest_batch(self, limit_bytes: int, most: int) -> int | None:
        """The largest micro-batch of at most ``most`` whose peak is within a limit; None where not even 1 is."""
        return largest(lambda batch: self.peak_bytes(batch) <= limit_bytes, most)

    @cached_property
    def _sizes(self) -> Sizes:
        rows = [[one.num_bytes for one in step.trace.allocations] for step in self.steps]
        return Sizes(self.batches, np.array(rows))

    @cached_property
    def _events(self) -> tuple[np.ndarray, np.ndarray]:
        """Allocations and frees in order: the allocation's number, and 1 or -1; several may share a moment."""
        allocations = self.steps[-1].trace.allocations
        born = [(one.born, -1, one.id) for one in allocations]
        died = [(one.died, 1, one.id) for one in allocations if one.died is not None]
        _, orders, numbers = np.array(sorted([*born, *died])).T
        return numbers, -orders


def fit_memory_model(
    plan: Plan,
    task: Task,
    accumulates: bool = False,
    largest_of: Largest = 1,
    target: Target = "cpu",
    few: int | None = None,
    savers: SharedSavers | None = None,
) -> MemoryModel:
    """The memory model of ``apply(plan, task)``, from optimizer steps over fake tensors.

    Args:
        plan: its batch does not matter.
        task: what it is applied to.
        accumulates: an optimizer step has more than one micro-batch.
        largest_of: where shapes vary, every batch repeats the largest of so many samples.
        target: the device that is planned for.
        few: a micro-batch, where few are asked for: it is traced, as any other then is, in place of three for all.
        savers: of the model that layers are put on, shared by its copies; None runs each.

    Raises:
        Untraceable: the training asks for values that such tensors do not have.
        Exception: whatever the user's code raises.
    """
    fake_training = FakeTraining(plan, task, largest_of, target, savers)

    @cache
    def trace_step(batch: int) -> TracedStep:
        return fake_training.step(batch, accumulates)

    if few is not None:
        trace_step(few)
        return MemoryModel((), trace_step, (), target)
    last = trace_step(BATCHES[-1])
    num_forward = _num_forward(last.trace)
    with suppress(Unlike):
        first = fake_training.step(BATCHES[0], accumulates, num_forward)
        if corresponds(first, last):
            second = fake_training.step(BATCHES[1], accumulates, num_forward)
            memory_model = MemoryModel((first, second, last), trace_step, BATCHES, target)
            if not memory_model.is_traced_at_each_batch:
                return memory_model
    return MemoryModel(tuple(map(trace_step, _LARGER)), trace_step, _LARGER, target)


def largest(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest micro-batch of 1 to ``most`` that fits; None where not even 1 does. By bisection: memory is taken to
    grow with the batch."""
    does, does_not = 0, most + 1
    while does_not - does > 1:
        batch = (does + does_not) // 2
        if fits(batch):
            does = batch
        else:
            does_not = batch
    return does or None


def corresponds(*steps: TracedStep) -> bool:
    """Whether the steps make the same allocations in the same order, so that their sizes can be extended."""
    return len({_outline(step.trace) for step in steps}) <= 1


def _num_forward(trace: Trace) -> int:
    """Allocations that the first forward makes."""
    end = next(span.start for span in trace.spans if span.phase == Phase.BACKWARD)
    return sum(one.phase == Phase.FORWARD and one.born <= end for one in trace.allocations)


def _outline(trace: Trace) -> tuple[object, ...]:
    """What two steps must have in common for their allocations to correspond."""
    return tuple((one.module, one.phase, one.kind, one.died is None, one.is_scratch) for one in trace.allocations)
