"""Memory over one optimizer step as a stacked area chart: coordinates for the page's SVG."""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...measure.profiling.allocations import Phase
from ...measure.profiling.types import Area, Profile, Timeline
from .axis import byte_ticks

WIDTH, HEIGHT = 960, 400
"""Of the plot, in the SVG's units."""
_HEADROOM = 1.12
_GREYS = {"parameter": "#62666f", "optimizer_state": "#7f848d", "gradient": "#a0a5ad"}
_REST = "#a8977d"


@dataclass(frozen=True)
class Shape:
    """One area."""

    area: Area
    path: str
    """SVG path data."""
    color: str
    peak_bytes: int
    """Alive at the peak."""


@dataclass(frozen=True)
class Band:
    """A phase on the horizontal axis."""

    phase: Phase
    x: float
    width: float


@dataclass(frozen=True)
class Chart:
    """All that the page draws."""

    shapes: tuple[Shape, ...]
    """From the bottom up."""
    bands: tuple[Band, ...]
    ticks: tuple[tuple[float, int], ...]
    """Heights and the bytes they stand for."""
    peak_x: float
    peak_y: float


def chart(base: Profile, peak_at: int) -> Chart:
    """Lay out a profile's timeline.

    Args:
        base: the profile; its phases are as wide as they are long, where times were taken.
        peak_at: the place of the peak among the timeline's moments.
    """
    line = base.timeline
    bands = tuple(_bands(line, base.phases_s))
    places = [_place(line, bands, moment) for moment in line.moments]
    top = max(1, round(base.peak.num_bytes * _HEADROOM))
    heights = [0] * len(places)
    shapes = []
    colors = _colors(line.areas)
    for area, color in zip(line.areas, colors, strict=True):
        above = [low + num_bytes for low, num_bytes in zip(heights, area.live_bytes, strict=True)]
        path = _path(places, [_y(value, top) for value in heights], [_y(value, top) for value in above])
        shapes.append(Shape(area, path, color, area.live_bytes[peak_at]))
        heights = above
    ticks = tuple((_y(value, top), value) for value in byte_ticks(0, top))
    return Chart(tuple(shapes), bands, ticks, places[peak_at], _y(heights[peak_at], top))


def _bands(line: Timeline, phases_s: Mapping[Phase, float]) -> Iterator[Band]:
    """As wide as their share of the time; of the moments, where no times were taken."""
    starts = [start for _, start in line.spans]
    moments = [end - start for start, end in zip(starts, [*starts[1:], line.num_moments], strict=True)]
    times = Counter(phase for phase, _ in line.spans)
    known = all(phases_s.get(phase) for phase, _ in line.spans)
    widths = [phases_s[phase] / times[phase] for phase, _ in line.spans] if known else [float(n) for n in moments]
    scale, x = WIDTH / (sum(widths) or 1), 0.0
    for (phase, _), width in zip(line.spans, widths, strict=True):
        yield Band(phase, x, width * scale)
        x += width * scale


def _place(line: Timeline, bands: Sequence[Band], moment: int) -> float:
    starts = [start for _, start in line.spans]
    at = max((number for number, start in enumerate(starts) if start <= moment), default=0)
    end = starts[at + 1] if at + 1 < len(starts) else line.num_moments
    share = (moment - starts[at]) / max(1, end - starts[at])
    return bands[at].x + bands[at].width * share


def _path(places: Sequence[float], low: Sequence[float], high: Sequence[float]) -> str:
    """Stairs there along the upper edge, and back along the lower."""
    parts = [f"M{places[0]:.1f} {high[0]:.1f}"]
    parts += [f"H{x:.1f}V{y:.1f}" for x, y in zip(places[1:], high[1:], strict=True)]
    parts.append(f"H{WIDTH}V{low[-1]:.1f}")
    for number in range(len(places) - 1, 0, -1):
        parts.append(f"H{places[number]:.1f}V{low[number - 1]:.1f}")
    return "".join([*parts, f"H{places[0]:.1f}Z"])


def _y(num_bytes: int, top: int) -> float:
    return HEIGHT * (1 - num_bytes / top)


def _colors(areas: Sequence[Area]) -> Iterator[str]:
    """Greys for what is there all along; a walk through the hues for the modules, in forward order."""
    num_blocks = sum(area.kind == "block" for area in areas)
    number = 0
    for area in areas:
        if area.kind == "block":
            hue = 0.57 + 0.62 * number / max(1, num_blocks - 1)
            rgb = colorsys.hls_to_rgb(hue % 1, 0.54 + 0.08 * (number % 2), 0.58)
            yield "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
            number += 1
        else:
            yield _GREYS.get(area.kind, _REST)
