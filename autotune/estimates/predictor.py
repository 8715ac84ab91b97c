"""``Predictor``: memory of one combination of techniques at any micro-batch, traced or, where that fails, probed."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from ..measure.profiling.allocations import Trace
from ..plan import Budget, Plan
from ..task import Task
from ..techniques import Settings
from ..techniques.allocator import Allocator
from ..techniques.batch import Batch
from .allocators import cuda_caching as segments
from .allocators.process import process_interval, resident_bytes, workers_bytes
from .memory_model import BATCHES
from .memory_model_cache import MemoryModelCache
from .tracing.fake_step import Untraceable
from .tracing.work import Work
from .types import EstimateOptions, Fit, Interval, Room


class PeakModel(Protocol):
    """A memory model: allocations, peak and work of a step at any micro-batch."""

    def at(self, batch: int) -> Trace:
        """The step's allocations at a micro-batch."""

    def interval(self, batch: int) -> Interval:
        """The tensors' peak with its interval."""

    def possible_bytes(self, batch: int) -> int:
        """Most that one kernel may take for itself beside what is known."""

    def host_bytes(self, batch: int) -> int:
        """What a step on a card keeps in the host's memory."""

    def work(self, batch: int) -> tuple[Work, Work]:
        """Work of forward and backward, and of the optimizer."""


@dataclass(frozen=True)
class Found:
    """A memory model, and how it was made."""

    memory_model: PeakModel
    how: Literal["traced", "probed"]
    reason: str | None


class Predictor:
    """Predicts what a process is charged at any batch."""

    def __init__(
        self,
        task: Task,
        options: EstimateOptions,
        base_bytes: int | None = None,
        memory_models: MemoryModelCache | None = None,
        micros: Collection[int] | None = None,
    ) -> None:
        """
        Args:
            task: what the combination is applied to.
            options: the combination, and the device that is planned for.
            base_bytes: what the process is charged without tensors; None finds out.
            memory_models: the task's, where there are others of its predictors.
            micros: micro-batches that will be asked for, as far as they are known; None is many.
        """
        self._task, self._options, self._micros = task, options, micros
        settings = options.settings.having(options.settings.precision.as_traced(task.precision))
        self._plan = Plan(settings=settings, budget=Budget(device="cpu"))
        self._found: dict[bool, Found] = {}
        self._fits: dict[int, Fit] = {}
        self._processes: dict[tuple[int, Allocator], Interval] = {}
        self.whole = options.reference_batch if options.is_held else 2
        """Samples from which on a micro-batch is a whole optimizer step."""
        self._last: tuple[int, Interval, Trace] | None = None
        """The last micro-batch with its tensors' peak and its trace, since allocators are asked one after the other."""
        self._is_cuda = options.target == "cuda"
        if base_bytes is not None:
            self.base_bytes = base_bytes
        elif self._is_cuda:
            self.base_bytes = options.context.value
        else:  # a dataset that lies in memory is the process's too
            dataset = task.build_dataset()
            self._task = replace(task, build_dataset=lambda: dataset)
            self.base_bytes = resident_bytes(options.settings.in_force(task.precision))
        self.memory_models = memory_models or MemoryModelCache(self._task, options.largest_of, options.target)
        """The task's."""

    def on(self, room: Room) -> Predictor:
        """The same on another card of its capability: what was traced serves there too."""
        other = copy(self)
        other._options = self._options.model_copy(update=dict(room))
        other._fits, other._processes = {}, {}
        other.base_bytes = room.context.value
        return other

    def memory_model(self, micro: int) -> Found:
        """The memory model of a step with this micro-batch."""
        accumulates = self._passes(micro) > 1
        if accumulates not in self._found:
            self._found[accumulates] = self._find(accumulates, micro)
        return self._found[accumulates]

    def fit(self, micro: int) -> Fit:
        """Tensors and process at a micro-batch."""
        if micro not in self._fits:
            memory_model, passes = self.memory_model(micro).memory_model, self._passes(micro)
            tensors, process = memory_model.interval(micro), self.process(micro, self._options.settings)
            self._fits[micro] = Fit(micro=micro, accumulate=passes, tensors=tensors, process=process)
        return self._fits[micro]

    def fit_or_none(self, micro: int) -> Fit | None:
        """The same; None where the training cannot run with this micro-batch, as a BatchNorm over one value."""
        try:
            return self.fit(micro)
        except Untraceable:
            return None

    def may_fit(self, micro: int, limit_bytes: int) -> bool:
        """Whether the tensors alone fit, which is quicker to tell."""
        try:
            return (
                self._calibrated(self.memory_model(micro).memory_model.interval(micro).plus(self.base_bytes)).low
                <= limit_bytes
            )
        except Untraceable:
            return False

    def goes(self, micro: int) -> bool:
        """Whether the settings allow a step of this micro-batch."""
        batch = Batch(micro=micro, accumulate=self._passes(micro))
        settings = self._plan.settings.in_force(self._task.precision)
        return settings.having(batch).conflict() is None

    def smallest(self) -> Fit:
        """The smallest micro-batch that can run."""
        return (self.fit_or_none(1) or self.fit(2)) if self.goes(1) else self.fit(self.whole)

    def _find(self, accumulates: bool, micro: int) -> Found:
        try:
            return Found(self.memory_models.of(self._plan, accumulates, self._few(accumulates, micro)), "traced", None)
        except Untraceable as error:
            return Found(self.memory_models.probed(self._plan, accumulates), "probed", str(error))

    def _few(self, accumulates: bool, micro: int) -> int | None:
        """This micro-batch, where so few are asked for that tracing each is quicker than tracing three for all; else
        None."""
        if self._micros is None or not BATCHES[0] <= micro <= BATCHES[-1]:
            return None  # what cannot run at 1 may run at others; and a large batch may have to be collated for real
        num_alike = sum((self._passes(one) > 1) == accumulates for one in self._micros)
        return micro if num_alike < len(BATCHES) else None

    def _passes(self, micro: int) -> int:
        return -(-self._options.reference_batch // micro) if self._options.is_held else 1

    def process(self, micro: int, settings: Settings) -> Interval:
        """What the process is charged, with the allocator and the loader workers of these settings.

        Raises:
            Untraceable: this batch had to be traced, and could not be.
        """
        key = micro, settings.allocator
        if key not in self._processes:
            self._processes[key] = self._calibrated(self._process(micro, settings))
        return self._processes[key] if self._is_cuda else self._processes[key].plus(workers_bytes(settings))

    def _calibrated(self, process: Interval) -> Interval:
        calibration = self._options.calibration
        return process if calibration is None else calibration.of(process)

    def _process(self, micro: int, settings: Settings) -> Interval:
        memory_model = self.memory_model(micro).memory_model
        if self._last is None or self._last[0] != micro:
            self._last = micro, memory_model.interval(micro), memory_model.at(micro)
        _, tensors, at = self._last
        if self._is_cuda:
            return segments.process_interval(at, tensors, self._options, memory_model.possible_bytes(micro))
        return process_interval(self.base_bytes, at, tensors, settings, self.memory_models.replayed)
