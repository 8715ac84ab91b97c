"""What a terminal shows."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console


def printed(what: Any, width: int) -> str:
    """Text or a table, in so many columns, without colours."""
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()
