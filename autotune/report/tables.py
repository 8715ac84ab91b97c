"""The tables that reports share: names on the left and words on the right; and figures for any width, where columns go
and names are cut if there is no room, figures never."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..searches.seconds import BESIDE, Spent, total_s
from ..units import format_duration

_GAP = 2
_SHORTEST_NAME = 16


def rows_table(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Two columns, indented by two; both wrap where the terminal is narrow."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan")
    table.add_column(ratio=1)
    for name, words in rows:
        table.add_row(Padding(Text(name), (0, 0, 0, 2)), Text(words) if isinstance(words, str) else words)
    return table


@dataclass(frozen=True)
class FittingTable:
    """Names in the first column, cut in their middle; of the others, those that there is room for."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    figures: Container[int]
    """Numbers of the columns that are justified to the right."""
    by_need: Sequence[int]
    """All columns but the first, the most needed first."""
    shortest_name: int = _SHORTEST_NAME
    """Columns that names are cut to before another column goes."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        widths = [max(map(cell_len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        shown, left = self._shown(widths, options.max_width)
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", pad_edge=False)
        for number in shown:
            justify = "right" if number in self.figures else "left"
            table.add_column(self.headings[number], justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(Text(row[number] if number else _cut(row[0], left)) for number in shown))
        yield table
        if len(shown) < len(widths):
            missing = ", ".join(heading for number, heading in enumerate(self.headings) if number not in shown)
            yield Text(f"no room for: {missing}", style="dim")

    def _shown(self, widths: Sequence[int], room: int) -> tuple[list[int], int]:
        """The columns that there is room for, in order, and what is left for the names."""
        left = room
        shown = [0]
        for number in self.by_need:
            if left - widths[number] - _GAP >= min(widths[0], self.shortest_name):
                left -= widths[number] + _GAP
                shown.append(number)
        return sorted(shown), left


def _cut(name: str, width: int) -> str:
    """Its end says most: which blocks, and how many."""
    if cell_len(name) <= width:
        return name
    head = (width - 1) // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"


def spent_table(spent: Spent) -> RenderableType:
    """Where a search's seconds went: a row for each thing that was done."""
    heading = Text(f"Where {format_duration(total_s(spent))} went", style="bold")
    return Group(heading, rows_table((done, _phases(phases)) for done, phases in spent.items()))


def _phases(phases: Mapping[str, float]) -> str:
    words = format_duration(sum(phases.values()))
    told = [f"{phase} {value:.1f} s" for phase, value in phases.items() if value >= 0.05]
    return f"{words}: {', '.join(told)}" if set(phases) - {BESIDE} else words
