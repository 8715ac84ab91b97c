"""The README's picture of a search: what its first search printed. `python -m benchmarks.picture` draws it."""

from __future__ import annotations

import io
import re

from rich.console import Console

from .rows import HERE

README = HERE.parent / "README.md"
PICTURE = HERE.parent / "docs" / "search.svg"
_COLUMNS = 112
_COMMAND = re.compile(r"^autotune search .*$", re.MULTILINE)
_OUTPUT = re.compile(r"```text\n(\[0 s\].*?no more trials[^\n]*\n)", re.DOTALL)


def main() -> None:
    """Write the picture anew."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(shown(), highlight=False, markup=False, end="")
    console.save_svg(str(PICTURE), title="autotune")


def shown() -> str:
    """The README's first search command, and what it printed up to the end of its trials."""
    text = README.read_text(encoding="utf-8")
    command, output = _COMMAND.search(text), _OUTPUT.search(text)
    assert command is not None, f"{README} has no search command"
    assert output is not None, f"{README} shows no search"
    return f"$ {command[0]}\n{output[1]}"


if __name__ == "__main__":
    main()
