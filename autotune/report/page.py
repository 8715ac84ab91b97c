"""The page that ``autotune profile --html`` writes: one file, no network, readable in the dark and in the light."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..measure.profiling.allocations import OUTSIDE
from ..measure.profiling.types import Profile
from ..results import Profiling
from . import chart as drawing
from .folding import lines
from .profile import KINDS, cells, changes, columns, moment_words, notes, peak_words, title
from .words import size

__all__ = ["page"]

_NAMES: dict[str, str] = {**{str(kind): words for kind, words in KINDS.items()}, OUTSIDE: "outside the modules"}


def page(found: Profiling, depth: int | None = None) -> str:
    """The page's HTML; names of modules are the user's, and are escaped.

    Args:
        found: what was profiled.
        depth: levels of modules of its table; None is as many as fit a screen.
    """
    # Names of modules go into the markup: everything is escaped.
    there = Environment(loader=PackageLoader("autotune.report"), autoescape=True, undefined=StrictUndefined)
    return there.get_template("profile.html").render(
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


def _peak_at(base: Profile) -> int:
    """The place of the peak among the timeline's moments."""
    totals = [sum(column) for column in zip(*(area.live_bytes for area in base.timeline.areas), strict=True)]
    return totals.index(max(totals))
