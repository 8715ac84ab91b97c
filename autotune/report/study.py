"""A study in words: what its trials came to, what was predicted of them, and what each choice of the plan bought."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan import Gain
from ..searches.requests import reference_settings
from ..searches.store.read_study import Stored
from ..searches.store.tried import Tried
from ..searches.winner.ablation import Share, counterparts, shares
from ..searches.winner.evidence import combine, gain, undisturbed
from ..units import format_duration, size
from ..words import (
    card_words,
    count,
    facts_words,
    outcome_words,
    percent,
    rate,
    settings_words,
    spread,
    times,
    trial_label,
)
from ..workers import Measured, OutOfMemory
from .charts.scatter import Bar
from .show import found_rows

_LONGEST = 240
"""Characters of why a trial cannot be used."""


@dataclass(frozen=True)
class TrialRow:
    """One trial as the page's table has it."""

    number: int
    label: str
    settings: str
    figures: tuple[str, ...]
    """As :func:`figure_names` has them."""
    outcome: str
    """What came of it; empty where it fits and there is nothing to say."""
    fits: bool
    """Whether it can be used."""
    is_plan: bool


@dataclass(frozen=True)
class Bought:
    """What one choice of the plan bought."""

    technique: str
    setting: str
    bar: Bar | None
    """The plan's speed over that without it, with its interval; None where that has none."""
    speed: str
    peak: str
    said: str
    """What follows, or why nothing does."""


def figure_names(stored: Stored) -> list[str]:
    """Headings of :attr:`TrialRow.figures`: what was predicted, quality and the GPU only where any was."""
    predicted = ["predicted", "predicted peak"] if stored.forecasts else []
    quality = ["quality"] if any(_quality(row) for row in stored.tried) else []
    card = ["GPU"] if any(_card(row) for row in stored.tried) else []
    speeds = ["samples/s", "over reference"]
    return [*speeds, *predicted[:1], "peak", *predicted[1:], *quality, *card, "took"]


def trial_rows(stored: Stored) -> Iterator[TrialRow]:
    """Trials in their order."""
    winner, wanted = stored.winner, figure_names(stored)
    for row in stored.tried:
        figures = _figures(row, stored)
        yield TrialRow(
            row.number,
            trial_label(row.number),
            settings_words(row.settings, stored.record.facts),
            tuple(figures.get(name, "") for name in wanted),
            _outcome(row, stored),
            row.verdict.feasible and row.number not in stored.fallen,
            winner is not None and row.number == winner.number,
        )


def _figures(row: Tried, stored: Stored) -> dict[str, str]:
    found = {"took": format_duration(row.outcome.seconds)}
    forecast = stored.forecasts.get(row.number)
    if forecast is not None and forecast.samples_per_s is not None:
        found["predicted"] = rate(forecast.samples_per_s.value)
    if forecast is not None and forecast.peak_bytes is not None:
        found["predicted peak"] = size(round(forecast.peak_bytes.value))
    if isinstance(row.outcome, OutOfMemory):
        found["peak"] = f"over {size(row.outcome.peak_bytes)}"
    if isinstance(row.outcome, Measured):
        measured = row.outcome.measurement
        found["samples/s"] = f"{rate(measured.samples_per_s.value)} {spread(measured.samples_per_s)}"
        found["peak"] = size(measured.peak.process)
        found |= {"quality": _quality(row), "GPU": _card(row)}
        reference = stored.reference
        if reference is not None and isinstance(reference.outcome, Measured):
            own = reference.outcome.measurement.samples_per_s.value
            found["over reference"] = times(measured.samples_per_s.value / own)
    return found


def _quality(row: Tried) -> str:
    found = row.outcome.measurement.quality if isinstance(row.outcome, Measured) else None
    if found is None:
        return ""
    return f"{found.value:.3g}" + (f" ± {found.error:.1g}" if found.error else "")


def _card(row: Tried) -> str:
    found = row.outcome.measurement.card if isinstance(row.outcome, Measured) else None
    return card_words([found] if found is not None else [])


def _outcome(row: Tried, stored: Stored) -> str:
    again = stored.fallen.get(row.number)
    if again is not None:
        said = f"could not be used when it was measured again: {again.verdict.reason}"
    else:
        winner = stored.winner
        is_plan = winner is not None and row.number == winner.number
        said = row.verdict.reason or ("the plan" if is_plan else "")
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


def offs(bars: Sequence[Bar]) -> str:
    """How far off predictions were: ``4.2 % off at the median; 6 of 7 within their 95 % intervals``."""
    off = statistics.median(abs(bar.value - 1) for bar in bars)
    within = sum(bar.low <= bar.value <= bar.high for bar in bars)
    return f"{percent(off).removeprefix('+')} off at the median; {within} of {len(bars)} within their 95 % intervals"


def bought(stored: Stored) -> list[Bought]:
    """What each choice of the plan bought, as far as an ablation measured it; empty where there was none."""
    winner, facts = stored.winner, stored.record.facts
    if winner is None:
        return []
    parts = list(counterparts(winner.applied, reference_settings(facts), facts))
    found = shares(winner.number, parts, stored.evidence)
    if not any(share.rounds or share.ended for share in found):
        return []
    return [_bought(share, stored) for share in found]


def _bought(share: Share, stored: Stored) -> Bought:
    part, budget = share.counterpart, stored.record.budget
    name, setting = part.choice.name, part.choice.describe(stored.record.facts)
    if not share.rounds:
        ended = "" if share.ended is None else outcome_words(share.ended, budget)
        said = f"cannot be reset alone: {part.conflict}" if part.conflict else f"without it: {ended or 'not measured'}"
        return Bought(name, setting, None, "", "", said)
    pairs = undisturbed(share.rounds)
    own = combine([pair.winner for pair in pairs], budget)
    is_job = part.settings == reference_settings(stored.record.facts)
    others = [pair.reference for pair in pairs if pair.reference is not None]
    other = combine(others, budget.of_job(*(run.peak.process for run in others)) if is_job else budget)
    found = gain(own, other, pairs, None)
    peaks = f"{size(own.peak.process)}, without it {size(other.peak.process)}"
    bar = Bar(name, found.speed, found.low, found.high) if found.speed and found.low and found.high else None
    return Bought(name, setting, bar, _gain_words(found), peaks, _verdict(found, other.fits))


def _gain_words(found: Gain) -> str:
    assert found.speed is not None, "both were measured"
    if found.low is None or found.high is None:
        return f"{times(found.speed)} (1 round)"
    return (
        f"{times(found.speed)} (95 %: {times(found.low)} to {times(found.high)}; {count(found.rounds or 0, 'round')})"
    )


def _verdict(found: Gain, fits_without: bool) -> str:
    if found.low is None or found.high is None:
        said = "one round proves nothing"
    elif round(found.low, 2) > 1:
        said = "faster with it"
    elif round(found.high, 2) < 1:
        said = "slower with it"
    else:
        said = "no difference in speed is proven"
    return said if fits_without else f"{said}; over the budget without it"


def facts_rows(stored: Stored) -> list[tuple[str, str]]:
    """Where trials were measured, and of what: a plan's own words where there is one."""
    facts = stored.record.facts
    rows = [("task", facts_words(facts)), ("study", f"{stored.name}, in {stored.where}")]
    if stored.plan is not None:
        return [*rows, *found_rows(stored.plan)["Measured on"]]
    return [*rows, ("versions", f"torch {facts.torch_version}"), ("threads", f"{facts.num_threads}")]


def as_json(stored: Stored) -> dict[str, Any]:
    """What the page is of, as plain data."""
    winner = stored.winner
    return {
        "study": stored.name,
        "trials": len(stored.tried),
        "plan_of_trial": winner.number if winner else None,
        "ablated": [one.technique for one in bought(stored)],
    }
