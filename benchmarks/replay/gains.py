"""What is believed of techniques' speed before any trial: as they state it, or as tables say that are not replayed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from autotune.techniques import Settings

from .problem import Gains, Problem
from .table import Table, load_table

TABLES = tuple(sorted((Path(__file__).parent / "tables").glob("*.jsonl")))
_FITTED = ("precision", "allocator", "memory_format")
"""Techniques whose stated gains were read off the tables."""
_LEAST, _ALONE = 0.1, 0.2
"""Standard deviations: at least; and of what a single table tells."""


def stated_gains(problem: Problem) -> Gains:
    """As :meth:`autotune.techniques.Technique.prior_gain` has them."""
    return Settings.prior_gains


def no_gains(problem: Problem) -> Gains:
    """Without those that were read off the tables."""
    return _without_fitted


def gains_of_other_tables(problem: Problem) -> Gains:
    """Those that were read off the tables, read off the tables that are not played."""
    learned = _learned(problem.table)

    def gains(settings: Settings) -> Mapping[str, tuple[float, float]]:
        known = {name: learned.get((name, getattr(settings, name).kind)) for name in _FITTED}
        return {**_without_fitted(settings), **{name: one for name, one in known.items() if one is not None}}

    return gains


def _without_fitted(settings: Settings) -> Mapping[str, tuple[float, float]]:
    return {name: one for name, one in settings.prior_gains().items() if name not in _FITTED}


@lru_cache
def _learned(left_out: str) -> dict[tuple[str, str], tuple[float, float]]:
    """By technique and kind: mean and standard deviation, over the tables, of the median gain in each."""
    medians: dict[tuple[str, str], list[float]] = {}
    for path in TABLES:
        if path.stem != left_out:
            for key, found in _ratios(load_table(path)).items():
                medians.setdefault(key, []).append(statistics.median(found))
    return {
        key: (statistics.fmean(row), max(_LEAST, statistics.stdev(row)) if len(row) > 1 else _ALONE)
        for key, row in medians.items()
    }


def _ratios(table: Table) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for name, kind, gain in _compared(table):
        found.setdefault((name, kind), []).append(gain)
    return found


def _compared(table: Table) -> Iterator[tuple[str, str, float]]:
    """Each configuration beside the one that differs from it in one technique alone, which is the user's own there."""
    for entry in table.measured:
        for name in _FITTED:
            choice = getattr(entry.settings, name)
            stock = table.by_settings.get(entry.settings.model_copy(update={name: type(choice)()}).canonical())
            if choice != type(choice)() and stock is not None and stock.outcome is None:
                yield name, choice.kind, entry.mean_log_speed - stock.mean_log_speed
