"""Why no configuration can be used: which budget binds, the nearest miss, and what would help."""

from __future__ import annotations

import json
import math

from ...errors import NothingFits
from ...plan import Budget, Latency, Peak
from ...techniques import Settings
from ...techniques.batch import refused_split
from ...units import ceil_mib, format_bytes, format_latency
from ...workers import Measured, OutOfMemory
from ..budget import limits_words
from ..session import Session
from ..store.tried import Tried


def nothing_fits(session: Session) -> NothingFits:
    """Why no configuration can be used: the nearest miss, and what would help."""
    tried, budget = session.study.tried, session.budget
    head = f"Nothing fits: none of {len(tried)} configurations can be used"
    if (limits := limits_words(budget.model_copy(update={"of_reference": None}))) != "none":
        head += f" within {limits} (margin {budget.margin:.0%})"
    lines = [f"{head}."]
    infeasible = [*(row for row in tried if not row.verdict.feasible), *session.study.fallen]
    misses = [(peak, row) for row in infeasible if (peak := _miss(row, budget)) is not None]
    # One that was ended at its limit needs more than was seen of it: it says nothing of the budget that admits it.
    whole = [(peak, row) for peak, row in misses if isinstance(row.outcome, Measured)]
    helps = []
    if whole:
        peak, nearest = min(whole, key=lambda miss: _ratio(budget, miss[0]))
        lines.append(f"Nearest miss: {_size(budget, peak)} with {in_words(nearest.settings)}.")
        is_share = nearest.number == 0 and budget.of_reference is not None
        wanted = {
            one.option: format_bytes(ceil_mib(one.needed_bytes)).replace(" ", "") for one in budget.excesses(peak)
        }
        wanted |= {"--budget": "100%"} if is_share and "--budget" in wanted else {}
        helps.append(f"{' and '.join(map(' '.join, wanted.items()))} would admit it")
    elif misses:
        peak, nearest = min(misses, key=lambda miss: _ratio(budget, miss[0]))
        seen = _size(budget, peak)
        lines.append(f"Nearest miss: more than {seen}, where it was ended, with {in_words(nearest.settings)}.")
    slow = [(found.p95_s, row) for row in infeasible if (found := _slow(row, budget)) is not None]
    if slow:
        seconds, nearest = min(slow, key=lambda miss: miss[0])
        takes = f"95 of 100 batches take up to {format_latency(seconds)}"
        lines.append(f"Nearest miss: {takes} with {in_words(nearest.settings)}.")
        helps.append(f"--max-latency {math.ceil(seconds * 1e6) / 1e3:g}ms would admit it")
    if not misses and not slow:
        lines += [f"Trial {row.number}: {row.verdict.reason}." for row in infeasible]
    if misses and (refused := refused_split(session.facts)) is not None:
        helps.append(refused)
    if helps:
        lines.append(f"What would help: {'; '.join(helps)}.")
    return NothingFits("\n".join(lines))


def in_words(settings: Settings) -> str:
    """Settings as a plan has them, on one line."""
    rows = settings.written()
    return ", ".join(f"{name} {json.dumps(row)}" for name, row in rows.items()).replace('"', "")


def _ratio(budget: Budget, peak: Peak) -> float:
    """What a miss takes over the limit that it exceeds most."""
    of_host = peak.host / budget.host if peak.host is not None and budget.host is not None else 0.0
    return max(peak.process / (budget.of_device or 1), of_host)


def _size(budget: Budget, peak: Peak) -> str:
    """``612 MiB``, of the memory whose budget binds."""
    if peak.host is not None and budget.host is not None and peak.host / budget.host == _ratio(budget, peak):
        return f"{format_bytes(ceil_mib(peak.host))} of the host's"
    return format_bytes(ceil_mib(peak.process))


def _slow(row: Tried, budget: Budget) -> Latency | None:
    """The latency of a trial that is unusable for it alone; None for any other."""
    if row.verdict.over_memory or not isinstance(row.outcome, Measured):
        return None
    found = row.outcome.measurement
    is_usable = not found.parity.is_other_training and found.leak_bytes_per_step is None
    return found.latency if is_usable and found.latency is not None and found.latency.exceeds(budget) else None


def _miss(row: Tried, budget: Budget) -> Peak | None:
    """The peak of a trial that is unusable for its memory alone; None for any other."""
    if not row.verdict.over_memory:
        return None
    if isinstance(row.outcome, OutOfMemory):
        seen = row.outcome.peak_bytes
        return Peak(process=0, host=seen) if row.outcome.of_host else Peak(process=seen)
    assert isinstance(row.outcome, Measured)
    measurement = row.outcome.measurement
    is_slow = measurement.latency is not None and measurement.latency.exceeds(budget)
    usable = not is_slow and not measurement.parity.is_other_training and measurement.leak_bytes_per_step is None
    return measurement.peak if usable else None
