"""The one table that all reports share: names on the left, words on the right."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def rows_table(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Two columns, indented by two; both wrap where the terminal is narrow."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan")
    table.add_column(ratio=1)
    for name, words in rows:
        table.add_row(Padding(Text(name), (0, 0, 0, 2)), Text(words) if isinstance(words, str) else words)
    return table
