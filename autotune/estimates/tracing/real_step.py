"""Real steps at small batches, extended to larger ones, for a training that cannot be traced over fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from ...measure.profiling.allocations import Phase, Trace
from ...measure.profiling.tracer import Sees
from ...plan import Plan
from ...task import Task
from ...training.training import Training
from ..memory_model import MemoryModel, corresponds
from ..types import Interval, Largest
from .fake_ops import Target
from .fake_step import FakeTraining
from .work import Work, work_between

PROBES = (2, 3, 6)
"""Micro-batches that are run."""
_ERROR = 0.15
"""Relative error of a peak extrapolated from two others. A guess: ``python -m benchmarks.estimate --probed`` counts
what lies beyond."""


@dataclass(frozen=True)
class ProbedModel:
    """A memory model that extrapolates the peak of each phase linearly from two real steps. The overall peak is not
    linear: it moves from one phase to another."""

    batches: tuple[int, int, int]
    """Ascending."""
    steps: tuple[Trace, Trace, Trace]
    """The traced steps, by batch."""
    work_of: tuple[Mapping[tuple[str, Phase], Work], ...] = ({}, {})
    """Work of the first and the last step."""

    most_host_bytes: int = 0
    """What the last step keeps in a card's host's memory."""
    host_kept_bytes: int = 0
    """What is there whatever the batch."""

    def at(self, batch: int) -> Trace:
        """The largest step that was run."""
        return self.steps[-1]

    def peak_bytes(self, batch: int) -> int:
        """Most bytes alive at once at a micro-batch >= 1, extrapolated."""
        share = (batch - self.batches[0]) / (self.batches[-1] - self.batches[0])
        first, last = (_phase_peaks(step) for step in (self.steps[0], self.steps[-1]))
        return max(round(own + (last.get(phase, own) - own) * share) for phase, own in first.items())

    def work(self, batch: int) -> tuple[Work, Work]:
        """Of forward and backward together, and of the optimizer, in one step at a micro-batch."""
        return work_between((self.batches[0], self.batches[-1]), self.work_of, batch)

    def possible_bytes(self, batch: int) -> int:
        """What kernels may take for themselves is in the interval."""
        return 0

    def host_bytes(self, batch: int) -> int:
        """What a step keeps is in proportion to the micro-batch."""
        return self.host_kept_bytes + round(self.most_host_bytes * batch / self.batches[-1])

    def interval(self, batch: int) -> Interval:
        """The peak with its interval, which is wider by as much as the middle step was off the line."""
        middle = self.steps[1].peak_bytes()
        off = abs(self.peak_bytes(self.batches[1]) / middle - 1)
        return Interval.around(self.peak_bytes(batch), _ERROR + off)


def fit_probed_model(
    plan: Plan, task: Task, accumulates: bool = False, largest_of: Largest = 1, target: Target = "cpu"
) -> MemoryModel | ProbedModel:
    """The memory model of ``apply(plan, task)`` from three real optimizer steps on the CPU: allocation by allocation
    where the three correspond, else by the peak of each phase.

    Raises:
        Exception: whatever the user's code raises.
    """

    def probe() -> _Probe:
        """With a model of its own, which nothing keeps."""
        return _Probe(plan, task, largest_of, target)

    one = probe()
    first, second, third = (one.step(batch, accumulates) for batch in PROBES)
    if corresponds(first, second, third):
        return MemoryModel((first, second, third), lambda batch: probe().step(batch, accumulates), PROBES)
    on_host = third.host_bytes, third.host_kept_bytes
    return ProbedModel(PROBES, (first.trace, second.trace, third.trace), (first.work, third.work), *on_host)


class _Probe(FakeTraining):
    """Real steps with the interface of a fake-tensor step."""

    def _applied_to(self, task: Task) -> Task:
        return task

    def _open(self, real: Training) -> None:
        self._model, self._optimizer = real.model, real.optimizer

    def _context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _shows(self) -> None:
        return None

    def _answers(self, phase: Phase, sees: Sees | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def _guard(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _copied(self, tree: Any) -> Any:
        return tree

    def _batch(self, micro: int) -> Any:
        """Samples in the dataset's order, from the first again after the last."""
        samples = [self._sample] * micro if self._largest_of != 1 else itertools.islice(self._samples(), micro)
        return (self._spec.collate or default_collate)(list(samples))

    def _samples(self) -> Iterator[Any]:
        dataset = self._spec.dataset
        if isinstance(dataset, IterableDataset):
            return itertools.cycle(itertools.islice(dataset, PROBES[-1]))
        return (dataset[number % len(dataset)] for number in itertools.count())


def _phase_peaks(trace: Trace) -> dict[tuple[Phase, int], int]:
    """Most bytes alive within each phase of each micro-batch."""
    live = trace.live_bytes()
    ends = [*(span.start for span in trace.spans[1:]), trace.num_moments]
    spans = zip(trace.spans, ends, strict=True)
    return {(span.phase, number): max(live[span.start : end]) for number, (span, end) in enumerate(spans)}
