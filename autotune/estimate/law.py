"""``MemoryLaw``: the memory of an optimizer step at every batch, from its allocations at three.

Each allocation's size is affine in the batch, or nearly so; the peak is not, since it moves from one moment to another.
So the sizes are extended, and the step's events replayed. A kernel's scratch jumps with the batch; it is reckoned anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ..measure.allocations import Trace
from ..plan import Plan
from ..task import Task
from .answers import Target
from .estimated import Interval
from .kernels import Kernel
from .rehearsal import Rehearsal, Rehearsed, Unlike
from .work import Work, work_between

__all__ = ["BATCHES", "ERROR", "MemoryLaw", "Size", "corresponds", "largest", "memory_law"]

BATCHES = (2, 3, 256)
"""Micro-batches that are traced: not 1, at which some tensors are contiguous that are not otherwise (where it is asked
for, it is traced itself); and one at which what goes piece by piece does."""
ERROR = 0.02
"""Share by which the tensors' peak may be off, by kernels' scratch: of measured peaks of models that the law was not
developed on, at most 5 % are to lie further above, which ``python -m benchmarks.estimate`` counts."""
_LARGER = (24, 36, 256)
"""Where those do not correspond, since a layer goes another way at small batches; what is asked below is traced."""
_STRAIGHT = 0.01
"""Share of a size by which its third point may lie off the line: bits are rounded up to bytes."""


@dataclass(frozen=True)
class Size:
    """Bytes of one allocation as a function of the micro-batch, from three of them."""

    batches: tuple[int, int, int]
    """Ascending."""
    num_bytes: tuple[int, int, int]
    """At each."""

    def at(self, batch: int) -> int:
        """On the line through all three; if the third is below that of the first two, on theirs but at most the third,
        as of what goes piece by piece; and if it is above, on the parabola through all three."""
        (first, second, third), (a, b, c) = self.batches, self.num_bytes
        line = a + (b - a) * (batch - first) / (second - first)
        bend = c - (a + (b - a) * (third - first) / (second - first))
        if abs(bend) <= _STRAIGHT * c:
            return max(0, round(a + (c - a) * (batch - first) / (third - first)))
        if bend < 0:
            return round(min(line, c))
        curve = bend / ((third - first) * (third - second))
        return max(0, round(line + curve * (batch - first) * (batch - second)))


@dataclass(frozen=True)
class MemoryLaw:
    """What an optimizer step allocates, and its peak, at any micro-batch."""

    steps: tuple[Rehearsed, Rehearsed, Rehearsed]
    """At three batches; what happens when is taken from the last."""
    rehearse: Callable[[int], Rehearsed]
    """The step at another batch."""
    batches: tuple[int, int, int] = BATCHES
    """Of the steps, ascending."""

    @cached_property
    def is_traced_at_each_batch(self) -> bool:
        """Whether the allocations of two batches do not correspond, as where a forward loops over the batch: then no
        size can be extended, and each batch that is asked for is traced, which is exact and takes longer."""
        return not corresponds(*self.steps)

    def at(self, batch: int) -> Trace:
        """The step's allocations at a micro-batch >= 1.

        Raises:
            Untraceable: this batch had to be traced, and could not be.
        """
        if self.is_traced_at_each_batch or batch < self.batches[0]:
            return self.rehearse(batch).trace
        last = self.steps[-1].trace
        sized = zip(last.allocations, self._sizes_at(batch), strict=True)
        return replace(last, allocations=tuple(replace(one, num_bytes=num_bytes) for one, num_bytes in sized))

    def peak_bytes(self, batch: int) -> int:
        """Most bytes alive at once at a micro-batch >= 1."""
        if self.is_traced_at_each_batch or batch < self.batches[0]:
            return self.rehearse(batch).trace.peak_bytes()
        live = peak = 0
        sizes = self._sizes_at(batch)
        for number, sign in self._events:
            live += sign * sizes[number]
            peak = max(peak, live)
        return peak

    def work(self, batch: int) -> tuple[Work, Work]:
        """Of forward and backward together, and of the optimizer, in one step at a micro-batch."""
        first, *_, last = self.steps
        return work_between((self.batches[0], self.batches[-1]), (first.work, last.work), batch)

    def interval(self, batch: int) -> Interval:
        """The peak, and between what it lies: at most one in twenty is above."""
        return Interval.around(self.peak_bytes(batch), ERROR)

    def largest_batch(self, limit_bytes: int, most: int) -> int | None:
        """The largest micro-batch of at most ``most`` whose peak is within a limit; None where not even 1 is."""
        return largest(lambda batch: self.peak_bytes(batch) <= limit_bytes, most)

    def _sizes_at(self, batch: int) -> list[int]:
        """Bytes of each allocation: extended where it was seen, reckoned anew where it is a kernel's scratch."""
        sizes = [size.at(batch) for size in self._sizes]
        steps = (batch - self.batches[0]) / (self.batches[1] - self.batches[0])
        for number, first, second in self._kernels:
            sizes[number] = first.extended(second, steps).num_bytes()
        return sizes

    @cached_property
    def _sizes(self) -> list[Size]:
        columns = zip(*(step.trace.allocations for step in self.steps), strict=True)
        return [Size(self.batches, (a.num_bytes, b.num_bytes, c.num_bytes)) for a, b, c in columns]

    @cached_property
    def _kernels(self) -> list[tuple[int, Kernel, Kernel]]:
        """Kernels at the first two batches, each with the number of its allocation; those that never take any aside."""
        numbers = [one.id for one in self.steps[0].trace.allocations if one.is_scratch]
        first, second, _ = (step.kernels for step in self.steps)
        found = zip(numbers, first, second, strict=True)
        return [(number, a, b) for number, a, b in found if any(self._sizes[number].num_bytes)]

    @cached_property
    def _events(self) -> list[tuple[int, int]]:
        """Allocations (1) and frees (-1) in order, each with the allocation's number; several may share a moment."""
        allocations = self.steps[-1].trace.allocations
        born = [(one.born, -1, one.id) for one in allocations]
        died = [(one.died, 1, one.id) for one in allocations if one.died is not None]
        return [(number, -order) for _, order, number in sorted([*born, *died])]


def memory_law(
    plan: Plan, task: Task, accumulates: bool = False, largest_of: int = 1, target: Target = "cpu"
) -> MemoryLaw:
    """The law of ``apply(plan, task)``, from optimizer steps over tensors without values.

    Args:
        plan: its batch does not matter.
        task: what it is applied to.
        accumulates: an optimizer step has more than one micro-batch.
        largest_of: where shapes vary, every batch repeats the largest of so many samples.
        target: the device that is planned for.

    Raises:
        Untraceable: the training asks for values that such tensors do not have.
        Exception: whatever the user's code raises.
    """
    rehearsal = Rehearsal(plan, task, largest_of, target)

    @cache
    def rehearse(batch: int) -> Rehearsed:
        return rehearsal.step(batch, accumulates)

    last = rehearse(BATCHES[-1])
    num_forward = _num_forward(last.trace)
    with suppress(Unlike):
        first = rehearsal.step(BATCHES[0], accumulates, num_forward)
        if corresponds(first, last):
            second = rehearsal.step(BATCHES[1], accumulates, num_forward)
            law = MemoryLaw((first, second, last), rehearse, BATCHES)
            if not law.is_traced_at_each_batch:
                return law
    return MemoryLaw(_three(*map(rehearse, _LARGER)), rehearse, _LARGER)


def largest(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest micro-batch of 1 to ``most`` that fits; None where not even 1 does. What a batch needs is taken to
    grow with it."""
    does, does_not = 0, most + 1
    while does_not - does > 1:
        batch = (does + does_not) // 2
        if fits(batch):
            does = batch
        else:
            does_not = batch
    return does or None


def _three(first: Rehearsed, second: Rehearsed, third: Rehearsed) -> tuple[Rehearsed, Rehearsed, Rehearsed]:
    return first, second, third


def corresponds(*steps: Rehearsed) -> bool:
    """Whether each allocation of one step is one of every other's, in the same place."""
    return len({_outline(step.trace) for step in steps}) <= 1


def _num_forward(trace: Trace) -> int:
    """Allocations that the first forward makes."""
    end = next(span.start for span in trace.spans if span.phase == "backward")
    return sum(one.phase == "forward" and one.born <= end for one in trace.allocations)


def _outline(trace: Trace) -> tuple[object, ...]:
    """What two batches must have in common for their allocations to correspond."""
    return tuple((one.module, one.phase, one.kind, one.died is None, one.is_scratch) for one in trace.allocations)
