"""A profile's rows as lines of a table: nested, cut at a depth, repeated blocks folded into one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ..measure.profiling.allocations import OUTSIDE
from ..measure.profiling.types import ModuleRow

_MOST_LINES = 26
"""A table that fits a screen."""


@dataclass(frozen=True)
class Line:
    """One module, or several that are alike; its figures are their sums."""

    label: str
    """The last part of the name, ``0-11 (12x)`` for folded ones; with what stands above it where that says no more."""
    depth: int
    """Levels below the model."""
    rows: tuple[ModuleRow, ...]

    @property
    def type(self) -> str:
        """The class of them all."""
        return self.rows[0].type

    @property
    def names(self) -> tuple[str, ...]:
        """Qualified."""
        return tuple(row.name for row in self.rows)

    def sum(self, figure: str) -> Any:
        """Of one of the rows' fields; None where it is not known."""
        values = [getattr(row, figure) for row in self.rows]
        return None if None in values else sum(values)


def lines(rows: Sequence[ModuleRow], depth: int | None = None) -> list[Line]:
    """The table.

    Args:
        rows: of a profile, in its order.
        depth: levels below the model to show, >= 0; None is as many as fit a screen, at least one.
    """
    tree = _Tree(rows)
    if depth is not None:
        return list(tree.lines(depth))
    deepest = max(row.name.count(".") + 1 for row in rows)
    fitting = [found for at in range(2, deepest + 1) if len(found := list(tree.lines(at))) <= _MOST_LINES]
    return max(fitting, key=len, default=list(tree.lines(1)))


class _Tree:
    def __init__(self, rows: Sequence[ModuleRow]) -> None:
        self._rows: Mapping[str, ModuleRow] = {row.name: row for row in rows}
        self._children: dict[str, list[str]] = {}
        for name in self._rows:
            if name not in ("", OUTSIDE):
                self._children.setdefault(name.rpartition(".")[0], []).append(name)
        self._likeness: dict[str, tuple[Any, ...]] = {}

    def lines(self, depth: int) -> Iterator[Line]:
        """Down to ``depth`` levels below the model."""
        model = self._rows[""]
        yield Line(model.type, 0, (model,))
        yield from self._below([""], 1, depth)
        yield Line(OUTSIDE, 0, (self._rows[OUTSIDE],))

    def _below(self, parents: Sequence[str], level: int, depth: int) -> Iterator[Line]:
        """Lines within modules that are alike."""
        if level > depth:
            return
        for twins in self._folded(parents[0]):
            last = [name.rpartition(".")[2] for name in twins]
            names = [f"{parent}.{part}".lstrip(".") for parent in parents for part in last]
            label = last[0] if len(last) == 1 else f"{last[0]}-{last[-1]} ({len(last)}x)"
            line = Line(label, level, tuple(self._rows[name] for name in names))
            within = list(self._below(names, level + 1, depth))
            direct = [inner for inner in within if inner.depth == level + 1]
            if len(direct) == 1 and _says_the_same(line, direct[0]):
                yield replace(direct[0], label=f"{line.label}.{direct[0].label}", depth=level)
                yield from (replace(inner, depth=inner.depth - 1) for inner in within if inner is not direct[0])
            else:
                yield line
                yield from within

    def _folded(self, parent: str) -> Iterator[list[str]]:
        """A module's children, those side by side that are numbered and alike together."""
        children = self._children.get(parent, [])
        for _, alike in groupby(enumerate(children), lambda pair: self._key(*pair)):
            yield [name for _, name in alike]

    def _key(self, place: int, name: str) -> tuple[Any, ...]:
        last = name.rpartition(".")[2]
        return (int(last) - place, self._like(name)) if last.isdecimal() else (name,)

    def _like(self, name: str) -> tuple[Any, ...]:
        """What alike modules have in common, all the way down; what they have at the peak depends on when it is."""
        if name not in self._likeness:
            row, children = self._rows[name], self._children.get(name, [])
            inner = tuple((child.rpartition(".")[2], self._like(child)) for child in children)
            self._likeness[name] = (row.type, row.num_parameters, row.kept_bytes, inner)
        return self._likeness[name]


def _says_the_same(line: Line, only: Line) -> bool:
    """Whether a container's line is that of the one thing in it."""
    figures = ("num_parameters", "kept_bytes", "peak_bytes")
    return all(line.sum(figure) == only.sum(figure) for figure in figures)
