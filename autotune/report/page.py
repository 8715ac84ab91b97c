"""The pages that ``autotune profile --html`` and ``autotune report`` write: one file each, no network, readable in the
dark and in the light."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..measure.profiling.allocations import OUTSIDE
from ..measure.profiling.types import Profile
from ..results import Profiling
from ..searches.budget import limits_words
from ..searches.store.read_study import Stored
from ..units import size
from ..words import count, outcome_words, percent, trial_label
from ..workers import Measured
from .charts import memory as drawing
from .charts import scatter
from .folding import lines
from .profile import KINDS, cells, changes, columns, moment_words, notes, peak_words, title
from .show import found_rows, headline, settings_rows
from .study import bought, facts_rows, figure_names, offs, trial_rows

_NAMES: dict[str, str] = {**{str(kind): words for kind, words in KINDS.items()}, OUTSIDE: "outside the modules"}
_KEY: tuple[tuple[scatter.Kind, bool, str], ...] = (
    ("fits", True, "the plan's trial"),
    ("fits", False, "fits"),
    ("over", False, "over the budget"),
    ("unusable", False, "cannot be used"),
    ("out of memory", False, "ran out of memory here"),
)
"""What marks stand for."""


@cache
def _templates() -> Environment:
    """Names and texts are the user's, and go into the markup: everything is escaped."""
    environment = Environment(loader=PackageLoader("autotune.report"), autoescape=True, undefined=StrictUndefined)
    environment.filters["percent"] = percent
    return environment


def page(found: Profiling, depth: int | None = None) -> str:
    """A profile's HTML.

    Args:
        found: what was profiled.
        depth: levels of modules of its table; None is as many as fit a screen.
    """
    return (
        _templates()
        .get_template("profile.html")
        .render(
            title=title(found),
            peak=peak_words(found.base.peak, found.base),
            moment=moment_words(found.base.peak, found.base),
            peak_size=size(found.base.peak.num_bytes),
            chart=drawing.chart(found.base, _peak_at(found.base)),
            width=drawing.WIDTH,
            height=drawing.HEIGHT,
            names=_NAMES,
            size=size,
            columns=columns(found),
            rows=[cells(line, found) for line in lines(found.base.modules, depth)],
            kinds=[(KINDS[kind], size(num_bytes)) for kind, num_bytes in found.base.peak.by_kind.items()],
            changes=list(changes(found)),
            notes=list(notes(found.base)),
        )
    )


def _peak_at(base: Profile) -> int:
    """The place of the peak among the timeline's moments."""
    totals = [sum(column) for column in zip(*(area.live_bytes for area in base.timeline.areas), strict=True)]
    return totals.index(max(totals))


def study_page(stored: Stored) -> str:
    """A study's HTML."""
    plan, chart, parts = stored.plan, scatter.tradeoff(stored), bought(stored)
    rows = {row.number: row for row in trial_rows(stored)}
    kinds = {(dot.kind, rows[dot.number].is_plan) for dot in chart.dots} if chart else set()
    gains = {one.technique: one.bar for one in parts if one.bar is not None}
    found = found_rows(plan) if plan else {}
    return (
        _templates()
        .get_template("study.html")
        .render(
            title=f"autotune report: {stored.record.task}",
            headline=_headline(stored),
            chart=chart,
            about_chart=f"speed against peak memory of {count(len(rows), 'trial')}; each leads to its row in the table",
            width=scatter.WIDTH,
            height=scatter.HEIGHT,
            size=size,
            key=[row for row in _KEY if row[:2] in kinds],
            limit=limits_words(stored.record.budget),
            evidence={"Measured": found.get("Measured"), "Found": found.get("Found"), "Where": facts_rows(stored)},
            settings=settings_rows(plan) if plan else (),
            bought=parts,
            is_reference=stored.winner is not None and stored.winner.number == 0,
            gains=gains,
            gain_bars=scatter.bars(list(gains.values())),
            misses=list(_misses(stored)),
            columns=figure_names(stored),
            rows=rows,
            notes=plan.notes if plan else (),
            plan=plan.to_yaml() if plan else None,
        )
    )


def _headline(stored: Stored) -> str:
    if stored.plan is not None:
        return f"The plan: {headline(stored.plan)}"
    if (best := stored.best) is None:
        return f"There is no plan: none of {count(len(stored.tried), 'trial')} so far can be used."
    assert isinstance(best.outcome, Measured), "it can be used"
    budget = stored.record.budget
    budget = budget if best.number else budget.of_job(best.outcome.measurement.peak.process)
    so_far = f"{trial_label(best.number)}, {outcome_words(best.outcome, budget)}"
    return f"There is no plan: the search has not ended. The fastest so far: {so_far}."


def _misses(stored: Stored) -> Iterator[tuple[str, scatter.Bars, str]]:
    for name, found in (("Speed", scatter.misses(stored, "speed")), ("Peak memory", scatter.misses(stored, "peak"))):
        if (drawn := scatter.bars(found)) is not None:
            yield name, drawn, offs(found)
