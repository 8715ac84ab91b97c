"""Loader workers that need no trial: what they would take of the host's memory is known of others, or more of them were
seen to gain nothing (the knee of their throughput)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ...plan import Peak
from ...techniques import Settings
from ...units import ceil_mib, format_bytes
from ...workers import Measured, OutOfMemory
from ..store.pace import error_of
from ..store.study import Study
from ..store.tried import Tried
from .acquisition import GAIN

_BEYOND_NOISE = 1.64
"""Standard errors by which more workers have to be faster: one-sided, at 95 %."""
_READY = 2
"""Batches that each worker had ready where the loader was measured alone: torch's default."""


class Loaders:
    """What is known of configurations by others that are the same but for the loader."""

    def __init__(self, study: Study, step_bytes: Callable[[Settings], int] = lambda settings: 0) -> None:
        """
        Args:
            study: by what it has measured, now and later.
            step_bytes: what a step of a configuration is predicted to keep in a card's host's memory.
        """
        self._study, self._facts, self._step_bytes = study, study.record.facts, step_bytes
        self._is_card = self._facts.device.type == "cuda"

    def witness(self, settings: Settings) -> Tried | None:
        """What a trial would show that need not be run; None where it has to."""
        is_stock = not settings.num_loading(self._facts) and not settings.host_cached_bytes(self._facts)
        return self._over(settings, is_stock) or (None if is_stock else self._at_knee(settings))

    def fewest(self, first: Tried) -> Tried:
        """Of usable trials that are the same but for the loader and not slower beyond noise, that of fewest workers;
        the job as it stands aside, which takes turns with the plan."""
        enough = [row for row in self._fewer(first.settings) if row.number and not self._is_faster(first, row)]
        return next(iter(enough), first)

    def host_bytes(self, settings: Settings) -> int | None:
        """What a configuration is expected to take of the host's memory: of a card's, by the least that any took beside
        its loader and what its steps keep there; of a CPU's, by one that is the same but for the loader. None where
        there is none."""
        rows = self._measured() if self._is_card else self._alike(settings)
        beside = [
            size - (peak.workers or 0) - self._kept(row.settings)
            for row in rows
            if (peak := _peak(row)) is not None and (size := peak.host if self._is_card else peak.process) is not None
        ]
        workers = self.workers_bytes(settings)
        return None if not beside or workers is None else max(min(beside), 0) + workers + self._kept(settings)

    def workers_bytes(self, settings: Settings) -> int | None:
        """What its loader workers are expected to take beside the process: so many times what each was seen to take
        beside its batches, and the batches that they have ready. By trials; before there is one with workers, by the
        loader alone. None where nothing is known of any.

        Source: https://github.com/ultralytics/ultralytics/pull/26089: proportional sizes grow with the workers, within
        8 %.
        """
        if not (number := settings.num_loading(self._facts)):
            return 0
        facts = self._facts
        sample_bytes = (facts.dataset_bytes or 0) / (facts.dataset_length or 1)
        seen = [
            (of_row, self._num_ready(row.settings), peak.workers)
            for row in self._measured()
            if (of_row := row.settings.num_loading(facts)) and (peak := _peak(row)) is not None and peak.workers
        ]
        micro = facts.micro_batch or facts.effective_batch
        seen = seen or [(one, one * _READY * micro, taken) for one, taken in facts.loader_bytes.items() if one]
        if not seen:
            return None
        each = max(max(taken - ready * sample_bytes, 0.0) / of_row for of_row, ready, taken in seen)
        return round(number * each + self._num_ready(settings) * sample_bytes)

    def _over(self, settings: Settings, is_stock: bool) -> Tried | None:
        """As a trial that is over the host's budget, where that is foreseen."""
        budget = self._study.record.budget
        if budget.host is None or (is_stock and not self._step_bytes(settings)):
            return None
        needed = self.host_bytes(settings)
        if needed is None or needed * (1 + budget.margin) <= budget.host:
            return None
        said = f"{format_bytes(ceil_mib(needed))} of the host's memory are expected, by what others took"
        outcome = OutOfMemory(peak_bytes=needed, message=said, of_host=self._is_card)
        return Tried(0, settings, outcome, self._study.judge(outcome))

    def _at_knee(self, settings: Settings) -> Tried | None:
        """A usable trial with fewer workers, which is as fast as more of them can be: nothing waits for it, or one that
        has more is no faster beyond noise."""
        fewer = self._fewer(settings)
        for row in fewer:
            assert isinstance(row.outcome, Measured), "it is feasible"
            if row.outcome.measurement.loader_wait < math.expm1(GAIN):
                return row
            more = [one for one in fewer if self._number(one) > self._number(row)]
            if more and not any(self._is_faster(one, row) for one in more):
                return row
        return None

    def _fewer(self, settings: Settings) -> list[Tried]:
        """Usable trials that load anew, are the same but for the loader, and have fewer workers; the fewest first."""
        most = settings.num_loading(self._facts)
        rows = [row for row in self._alike(settings) if self._number(row) < most and not self._cached(row.settings)]
        usable = [row for row in self._study.feasible if row in rows]
        return sorted(usable, key=lambda row: (self._number(row), -self._study.log_speed(row)))

    def _alike(self, settings: Settings) -> Iterator[Tried]:
        rest = settings.stock("loader")
        return (row for row in self._study.tried if row.settings.stock("loader") == rest)

    def _measured(self) -> Iterator[Tried]:
        return (row for row in self._study.tried if isinstance(row.outcome, Measured))

    def _is_faster(self, one: Tried, other: Tried) -> bool:
        error = math.hypot(*(self._error(row) for row in (one, other)))
        return self._study.log_speed(one) - self._study.log_speed(other) > _BEYOND_NOISE * error

    def _error(self, row: Tried) -> float:
        assert isinstance(row.outcome, Measured), "it is feasible"
        return math.hypot(error_of(row.outcome.measurement.samples_per_s), self._study.paces.of(row.number).error)

    def _number(self, row: Tried) -> int:
        return row.settings.num_loading(self._facts)

    def _num_ready(self, settings: Settings) -> int:
        """Samples in the batches that its workers have ready."""
        own = self._facts.micro_batch or self._facts.effective_batch
        return settings.num_ready(self._facts) * (settings.batch.micro if settings.batch is not None else own)

    def _kept(self, settings: Settings) -> int:
        """In the host's memory: an epoch, and what a step on a card keeps there."""
        return self._cached(settings) + (self._step_bytes(settings) if self._is_card else 0)

    def _cached(self, settings: Settings) -> int:
        """An epoch that is kept in the host's memory."""
        return settings.host_cached_bytes(self._facts) if self._is_card else settings.cached_bytes(self._facts)


def _peak(row: Tried) -> Peak | None:
    return row.outcome.measurement.peak if isinstance(row.outcome, Measured) else None
