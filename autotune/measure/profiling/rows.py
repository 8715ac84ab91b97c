"""Turns a trace into what is shown: a row for each module, the peak, and the areas of the chart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from torch import nn

from .allocations import OUTSIDE, Allocation, Kind, Phase, Trace
from .types import Area, ModuleRow, PeakMoment, Timeline

_MOST_POINTS = 400
"""Most moments in a timeline: a page has room for no more."""
_MOST_BLOCKS = 12
"""Most groups of modules in a chart: more cannot be told apart."""

Number = TypeVar("Number", int, float)


def inclusive(own: Mapping[str, Number]) -> dict[str, Number]:
    """Sums over each module and its descendants; OUTSIDE stays apart."""
    found: dict[str, Number] = {}
    for name, value in own.items():
        for above in (name,) if name == OUTSIDE else _above_and_self(name):
            found[above] = found.get(above, 0) + value
    return found


def _above_and_self(name: str) -> list[str]:
    """A module's ancestors and itself: ``""``, ``a``, ``a.b`` for ``a.b``."""
    return ["", *accumulate(name.split("."), "{}.{}".format)] if name else [""]


def module_rows(
    model: nn.Module,
    order: Sequence[str],
    trace: Trace,
    forward_s: Mapping[str, float] | None,
    backward_s: Mapping[str, float] | None,
) -> Iterator[ModuleRow]:
    """A row for each module, in forward order, and one for OUTSIDE.

    Args:
        model: as applied.
        order: names of the modules that ran, in order.
        trace: a steady step.
        forward_s: seconds by module, those within it counted; None leaves times out.
        backward_s: the same of backward.
    """
    modules = dict(model.named_modules())
    parameters: Counter[str] = Counter()
    seen: set[int] = set()
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parameters[name] += parameter.numel()
    num_parameters = inclusive(parameters)
    kept = inclusive(_sums((one.module, one.num_bytes) for one in trace.kept()))
    at_peak = inclusive(_sums((one.module, one.num_bytes) for one in trace.alive_at(trace.peak_moment())))
    for name in (*_in_order(modules, order), OUTSIDE):
        yield ModuleRow(
            name=name,
            type=type(modules[name]).__name__ if name in modules else "",
            num_parameters=num_parameters.get(name, 0),
            kept_bytes=kept.get(name, 0),
            peak_bytes=at_peak.get(name, 0),
            forward_s=None if forward_s is None else forward_s.get(name, 0.0),
            backward_s=None if backward_s is None else backward_s.get(name, 0.0),
        )


def peak_moment(trace: Trace) -> PeakMoment:
    """When the peak is, and what fills it."""
    moment = trace.peak_moment()
    made = trace.maker_at(moment)
    by_kind: Counter[Kind] = Counter()
    for one in trace.alive_at(moment):
        by_kind[one.kind] += one.num_bytes
    return PeakMoment(
        num_bytes=by_kind.total(),
        phase=made.phase if made else Phase.BEFORE,
        module=made.module if made else OUTSIDE,
        position=_position(trace, moment),
        by_kind=dict(by_kind.most_common()),
    )


def _position(trace: Trace, moment: int) -> float:
    """How far through its span a moment is, 0 to 1."""
    edges = [0, *(span.start for span in trace.spans), trace.num_moments]
    start, end = next((a, b) for a, b in pairwise(edges) if a <= moment < b)
    return (moment - start) / (end - start)


def timeline(trace: Trace, blocks: Sequence[str]) -> Timeline:
    """Memory over the step by groups of modules.

    Args:
        trace: a steady step.
        blocks: names of the model's repeated blocks, in order; each is a group, as are the modules beside them.
    """
    groups = _Groups(blocks)
    areas: dict[tuple[str, str], list[int]] = {}
    for one in trace.allocations:
        changes = areas.setdefault(groups.area_of(one), [0] * trace.num_moments)
        changes[one.born] += one.num_bytes
        if one.died is not None:
            changes[one.died] -= one.num_bytes
    live = {key: list(accumulate(changes)) for key, changes in areas.items()}
    moments = _worth_drawing(trace)
    kinds = ("parameter", "optimizer_state", "gradient", "block", "rest")
    found = [
        Area(name=name, kind=kind, live_bytes=tuple(live[kind, name][moment] for moment in moments))
        for kind, name in sorted(live, key=lambda key: kinds.index(key[0]))
    ]
    spans = tuple((span.phase, span.start) for span in trace.spans)
    return Timeline(moments=moments, num_moments=trace.num_moments, spans=spans, areas=tuple(_largest(found)))


class _Groups:
    """Which area of a chart an allocation belongs to."""

    def __init__(self, blocks: Sequence[str]) -> None:
        self._above = {"", *(above for name in blocks for above in _above_and_self(name)[:-1])}
        self._bins: dict[str, str] = {}
        width = math.ceil(len(blocks) / _MOST_BLOCKS)
        for start in range(0, len(blocks), max(1, width)):
            members = blocks[start : start + width]
            label = members[0] if len(members) == 1 else f"{members[0]} … {members[-1]}"
            self._bins.update(dict.fromkeys(members, label))

    def area_of(self, one: Allocation) -> tuple[str, str]:
        if one.kind in ("parameter", "optimizer_state", "gradient"):
            return one.kind, one.kind
        if one.module == OUTSIDE:
            return "rest", OUTSIDE
        group = next((name for name in _above_and_self(one.module) if name not in self._above), one.module)
        return "block", self._bins.get(group, group)


def _largest(areas: Sequence[Area]) -> Iterator[Area]:
    """The areas, the smaller groups of modules merged where they are too many."""
    blocks = sorted((area for area in areas if area.kind == "block"), key=lambda area: -max(area.live_bytes))
    small = blocks[_MOST_BLOCKS:]
    yield from (area for area in areas if area.kind != "rest" and area not in small)
    if small:
        together = tuple(map(sum, zip(*(area.live_bytes for area in small), strict=True)))
        yield Area(name="other modules", kind="rest", live_bytes=together)
    yield from (area for area in areas if area.kind == "rest")


def _worth_drawing(trace: Trace) -> tuple[int, ...]:
    """Moments to draw: the first, the last, and the highest of each stretch between."""
    live = trace.live_bytes()
    width = max(1, math.ceil(len(live) / _MOST_POINTS))
    stretches = (range(start, min(start + width, len(live))) for start in range(0, len(live), width))
    chosen = {max(stretch, key=lambda moment: (live[moment], -moment)) for stretch in stretches}
    return tuple(sorted(chosen | {0, len(live) - 1, trace.peak_moment()}))


def _in_order(modules: Mapping[str, nn.Module], order: Sequence[str]) -> Iterator[str]:
    """Names of modules, parents before children, siblings in the order of their first run; those that never ran
    last."""
    ran = {name: number for number, name in enumerate(order)}
    first: dict[str, float] = {}
    children: dict[str, list[str]] = {}
    for name in modules:
        for above in _above_and_self(name):
            first[above] = min(first.get(above, math.inf), ran.get(name, math.inf))
        if name:
            children.setdefault(name.rpartition(".")[0], []).append(name)

    waiting = [""]
    while waiting:
        name = waiting.pop()
        yield name
        waiting += sorted(children.get(name, []), key=lambda child: first[child])[::-1]


def _sums(pairs: Iterator[tuple[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, num_bytes in pairs:
        found[name] += num_bytes
    return found
