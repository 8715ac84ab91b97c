"""A table of measured configurations, what is true of it, and the budgets it is replayed at."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from autotune.estimates import Prediction
from autotune.plan import Budget
from autotune.techniques import Facts, Settings
from autotune.workers import Outcome, OutOfMemory
from autotune.workers.outcome import OUTCOME
from autotune.workers.table import Row, TableExecutor

MARGIN = 0.03
BUDGETS = {"tight": 0.15, "middle": 0.4, "loose": 0.8}
"""Share of a table's configurations that fit."""
_ENFORCED = {"cpu": 1.25, "cuda": 1.0}
"""Peak over the budget at which a trial is ended: by the watchdog, by the allocator."""


@dataclass(frozen=True)
class Entry:
    """One configuration, as it was recorded."""

    settings: Settings
    samples_per_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    predicted: Prediction | None
    """What was known of it before it was measured."""
    outcome: Outcome | None = None
    """What came back instead of a measurement."""
    seconds: float | None = None
    """How long a trial took; None where it was not recorded."""

    @property
    def mean_log_speed(self) -> float:
        """Logarithm of the mean over the repeats."""
        return math.log(statistics.fmean(self.samples_per_s))


@dataclass(frozen=True)
class Table:
    """Configurations measured exhaustively."""

    name: str
    entries: tuple[Entry, ...]
    device: Literal["cpu", "cuda"] = "cpu"

    @cached_property
    def measured(self) -> tuple[Entry, ...]:
        """Those that could be measured."""
        return tuple(entry for entry in self.entries if entry.outcome is None)

    @cached_property
    def by_settings(self) -> dict[str, Entry]:
        """Entries by ``settings.canonical()``."""
        return {entry.settings.canonical(): entry for entry in self.entries}

    @cached_property
    def relative_error(self) -> float:
        """Standard error of a mean over the repeats as a share, from the spread within all configurations together."""
        repeated = [
            [math.log(x) for x in entry.samples_per_s] for entry in self.measured if len(entry.samples_per_s) > 1
        ]
        if not repeated:
            return 0.0
        return math.sqrt(statistics.fmean(statistics.variance(row) / len(row) for row in repeated))

    def limit_bytes(self, budget: str) -> int:
        """A named budget: the one that its share of the configurations fits."""
        peaks = sorted(max(entry.peak_bytes) * (1 + MARGIN) for entry in self.measured)
        return math.ceil(peaks[min(int(BUDGETS[budget] * len(peaks)), len(peaks) - 1)])

    def executor(self, limit_bytes: int, seed: int) -> TableExecutor:
        """Answers trials as they were measured, each configuration's repeats in random order, and out of memory where
        the trial would have been ended."""
        return TableExecutor(Facts.model_construct(), self.rows(limit_bytes, seed))

    def rows(self, limit_bytes: int, seed: int) -> list[Row]:
        """What such an executor answers."""
        shuffler = random.Random(seed)
        most = round(limit_bytes * _ENFORCED[self.device])
        return [_row(entry, most, shuffler) for entry in self.entries]


@dataclass(frozen=True)
class Truth:
    """What is true of a table under a limit, by all repeats together."""

    table: Table
    limit_bytes: int

    @property
    def budget(self) -> Budget:
        """What trials are held against."""
        return Budget(limit=self.limit_bytes, device=self.table.device, margin=MARGIN)

    @cached_property
    def fitting(self) -> dict[str, float]:
        """Mean log speed of what fits in every repeat."""
        return {
            key: entry.mean_log_speed
            for key, entry in self.table.by_settings.items()
            if entry.outcome is None and max(entry.peak_bytes) * (1 + MARGIN) <= self.limit_bytes
        }

    @cached_property
    def best(self) -> float:
        """The highest of them."""
        return max(self.fitting.values())

    def regret(self, settings: Settings | None) -> float:
        """How much slower than the best, as a share; 0 within two standard errors, 1 where nothing was found."""
        if settings is None or settings.canonical() not in self.fitting:
            return 1.0
        behind = self.best - self.fitting[settings.canonical()]
        return 0.0 if behind <= 2 * math.sqrt(2) * self.table.relative_error else -math.expm1(-behind)


def load_table(path: Path, device: Literal["cpu", "cuda"] = "cpu") -> Table:
    """Read JSON lines of ``settings``, ``samples_per_s``, ``peak_bytes`` and ``predicted``; or of ``outcome``, where no
    measurement came back."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return Table(path.stem, tuple(_entry(json.loads(line)) for line in lines), device)


def _entry(row: dict[str, Any]) -> Entry:
    predicted = row.get("predicted") or {}
    known = {name: predicted.get(name) for name in ("peak_bytes", "high_bytes", "flops_per_sample", "bytes_per_sample")}
    return Entry(
        settings=Settings.model_validate(row["settings"]),
        samples_per_s=tuple(row.get("samples_per_s", ())),
        peak_bytes=tuple(row.get("peak_bytes", ())),
        outcome=OUTCOME.validate_python(row["outcome"]) if "outcome" in row else None,
        predicted=Prediction(**known) if known["peak_bytes"] else None,
        seconds=row.get("seconds"),
    )


def _row(entry: Entry, most_bytes: int, shuffler: random.Random) -> Row:
    if entry.outcome is not None:
        return Row(settings=entry.settings, outcome=entry.outcome)
    if min(entry.peak_bytes) > most_bytes:
        return Row(settings=entry.settings, outcome=OutOfMemory(peak_bytes=most_bytes, message="over the budget"))
    repeats = list(zip(entry.samples_per_s, entry.peak_bytes, strict=True))
    shuffler.shuffle(repeats)
    speeds, peaks = zip(*repeats, strict=True)
    return Row(settings=entry.settings, samples_per_s=speeds, peak_bytes=peaks)
