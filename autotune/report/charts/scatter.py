"""The charts of a report, laid out for SVG: speed against memory, predicted against measured, what choices bought."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal

from ...searches.store.read_study import Stored
from ...searches.store.tried import Tried
from ...searches.verdict import CONSTRAINTS
from ...workers import Measured, OutOfMemory
from .axis import Axis

WIDTH, HEIGHT = 640, 360
"""Of a plot, in the SVG's units."""
_GAPS = (16, 30, 44)
"""Between a mark and its label: the nearest that is free. A number stays by its mark, or is left out."""
_SIDES = (("start", 1, 0), ("end", -1, 0), ("middle", 0, -1), ("middle", 0, 1), ("end", -0.5, -1), ("end", -0.5, 1))
"""Where a label may stand: how it is anchored, how far to the right and how far down, in gaps."""
_BESIDE = 20
"""That a label may stand out of the plot, above and on the right."""
_LETTER, _LINE = 12.5, 24
"""Width and height of a label's letter where it is largest: on a phone."""

_ROOM, _LEAST = 2.0, 0.02
"""An axis of ratios goes as far as so many times what the farthest differs from 1, and that is at least so much."""

Kind = Literal["fits", "over", "unusable", "out of memory"]
_Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Dot:
    """One trial in the chart of speed and memory."""

    number: int
    kind: Kind
    x: float
    y: float
    is_on_front: bool
    label: str = ""
    """What stands beside it; empty where there is no room for it, or it needs none."""
    label_x: float = 0.0
    label_y: float = 0.0
    anchor: str = "start"


@dataclass(frozen=True)
class Tradeoff:
    """Speed against memory."""

    memory: Axis
    speed: Axis
    dots: tuple[Dot, ...]
    """The most important last, so that they are drawn above."""
    front: str
    """SVG path data of the front; empty where there is none."""
    limit_x: float | None
    """Of the budget's line."""


def usable_but_for_memory(row: Tried) -> bool:
    """Whether a trial was measured, and nothing but its memory may speak against it."""
    told = dict(zip(CONSTRAINTS, row.verdict.constraints, strict=True))
    return isinstance(row.outcome, Measured) and all(told[name] <= 0 for name in CONSTRAINTS if name != "memory")


def front(rows: Iterable[Tried]) -> list[Tried]:
    """The trials than which none is as fast with less memory, or faster with as much; by memory."""
    found: list[Tried] = []
    usable = [(_peak(row), -_speed(row), row.number, row) for row in rows if usable_but_for_memory(row)]
    for _, slowness, _, row in sorted(usable, key=lambda one: one[:3]):
        if not found or -slowness > _speed(found[-1]):
            found.append(row)
    return found


def tradeoff(stored: Stored) -> Tradeoff | None:
    """Lay out all trials of which speed or memory is known; None where none is."""
    shown = [row for row in stored.tried if isinstance(row.outcome, Measured | OutOfMemory)]
    speeds = [_speed(row) for row in shown if isinstance(row.outcome, Measured)]
    if not speeds:
        return None
    limit = stored.record.budget.limit
    memory = Axis.of([*map(_peak, shown), *([limit] if limit else [])], is_bytes=True)
    speed = Axis.of(speeds, from_zero=True)
    best = front(row for row in stored.tried if row.number not in stored.fallen)
    winner, on_front = stored.winner, {row.number for row in best}
    first = (0 if winner is None else winner.number, 0)
    ranked = sorted(shown, key=lambda row: (*(row.number == one for one in first), row.number in on_front, -row.number))
    dots = [_dot(row, stored, memory, speed, row.number in on_front) for row in ranked]
    steps = [(memory.place(_peak(row), WIDTH), HEIGHT - speed.place(_speed(row), HEIGHT)) for row in best]
    limit_x = None if limit is None else memory.place(limit, WIDTH)
    title = [] if limit_x is None else [(limit_x - WIDTH, -40.0, limit_x + WIDTH, -6.0)]
    return Tradeoff(
        memory,
        speed,
        tuple(_labelled(dots, dict(_names(stored, best)), [*_marks(dots, steps), *title])),
        _stairs(steps),
        limit_x,
    )


def _dot(row: Tried, stored: Stored, memory: Axis, speed: Axis, is_on_front: bool) -> Dot:
    x = memory.place(_peak(row), WIDTH)
    if isinstance(row.outcome, OutOfMemory):
        return Dot(row.number, "out of memory", x, HEIGHT, False)
    fallen = stored.fallen.get(row.number)
    over = row.verdict.over_memory or (fallen is not None and fallen.verdict.over_memory)
    usable = usable_but_for_memory(row) and (fallen is None or over)
    kind: Kind = "unusable" if not usable else "over" if over else "fits"
    return Dot(row.number, kind, x, HEIGHT - speed.place(_speed(row), HEIGHT), is_on_front)


def _names(stored: Stored, best: Sequence[Tried]) -> Iterator[tuple[int, str]]:
    yield from ((row.number, str(row.number)) for row in best)
    yield 0, "reference"
    if stored.winner is not None:
        yield stored.winner.number, "plan"


def _labelled(dots: Sequence[Dot], names: Mapping[int, str], taken: list[_Box]) -> Iterator[Dot]:
    """With labels where they cover neither a mark, nor the front, nor another label; the most important first."""
    done: list[Dot] = []
    for dot in reversed(dots):
        placed = _placed(dot, names[dot.number], taken) if dot.number in names else dot
        if placed.label:
            taken.append(_box(placed))
        done.append(placed)
    return reversed(done)


def _marks(dots: Sequence[Dot], steps: Sequence[tuple[float, float]]) -> Iterator[_Box]:
    """What no label may cover."""
    yield from ((dot.x - 8, dot.y - 8, dot.x + 8, dot.y + 8) for dot in dots)
    for (left, low), (right, high) in pairwise(steps):
        yield left, low - 1, right, low + 1
        yield right - 1, high, right + 1, low


def _placed(dot: Dot, label: str, taken: Sequence[_Box]) -> Dot:
    gaps = _GAPS[:1] if label.isdigit() else _GAPS
    for gap, (anchor, across, down) in product(gaps, _SIDES):
        y = dot.y + down * gap + _LINE * (0.25 + 0.35 * down)
        tried = replace(dot, label=label, label_x=dot.x + across * gap, label_y=y, anchor=anchor)
        left, top, right, bottom = box = _box(tried)
        inside = left >= 0 and right <= WIDTH + _BESIDE and top >= -_BESIDE and bottom <= HEIGHT
        if inside and not any(_meet(box, other) for other in taken):
            return tried
    return dot


def _box(dot: Dot) -> _Box:
    width = _LETTER * len(dot.label)
    left = dot.label_x - {"start": 0.0, "middle": width / 2, "end": width}[dot.anchor]
    return left, dot.label_y - _LINE * 0.8, left + width, dot.label_y + _LINE * 0.2


def _meet(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _stairs(steps: Sequence[tuple[float, float]]) -> str:
    """From each to the next, first along the axis of memory."""
    if len(steps) < 2:
        return ""
    (x, y), *rest = steps
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest)


def _peak(row: Tried) -> float:
    """Bytes; of a trial that ran out of memory, what was seen then."""
    assert isinstance(row.outcome, Measured | OutOfMemory)
    return row.outcome.measurement.peak.process if isinstance(row.outcome, Measured) else row.outcome.peak_bytes


def _speed(row: Tried) -> float:
    """Samples per second."""
    assert isinstance(row.outcome, Measured)
    return row.outcome.measurement.samples_per_s.value


@dataclass(frozen=True)
class Bar:
    """A ratio with its 95 % interval."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bars:
    """Ratios along one axis."""

    axis: Axis
    rows: tuple[Bar, ...]

    def place(self, ratio: float, length: float) -> float:
        """Distance from the low end, kept within the axis."""
        return min(max(self.axis.place(ratio, length), 0.0), length)


def misses(stored: Stored, what: Literal["speed", "peak"]) -> list[Bar]:
    """Of each trial that was predicted and measured, the measured value over the predicted one; the interval is where
    the prediction had it."""
    found = []
    for row in stored.tried:
        forecast = stored.forecasts.get(row.number)
        if forecast is None or not isinstance(row.outcome, Measured):
            continue
        said = forecast.samples_per_s if what == "speed" else forecast.peak_bytes
        seen = _speed(row) if what == "speed" else _peak(row)
        if said is not None:
            found.append(Bar(f"trial {row.number}", seen / said.value, said.low / said.value, said.high / said.value))
    return found


def bars(rows: Sequence[Bar]) -> Bars | None:
    """An axis that holds every value and 1, and of intervals as much as does not dwarf them; None without rows."""
    if not rows:
        return None
    most = _ROOM * max(_LEAST, *(abs(row.value - 1) for row in rows))
    ends = [min(max(end, 1 - most), 1 + most) for row in rows for end in (row.low, row.high)]
    return Bars(Axis.of([1.0, *(row.value for row in rows), *ends]), tuple(rows))
