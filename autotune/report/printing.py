"""How words and documents get onto a stream."""

from __future__ import annotations

import errno
import json as jsonlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["console", "print_json", "print_words"]


def console(file: Any) -> Console:
    """rich's, which gives way to a closed pipe as ``print`` does."""
    from rich.console import Console

    class Persistent(Console):
        def on_broken_pipe(self) -> None:
            """rich would leave the process."""
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Persistent(file=file)


def print_words(file: Any, words: RenderableType, width: int | None = None) -> None:
    """Print words; a pipe takes lines of ``width``."""
    printer = console(file)
    if width is not None and not printer.is_terminal:
        printer.width = width
    with printer.capture() as captured:
        printer.print(words)
    lines = captured.get().splitlines()
    print("\n".join(line.rstrip() for line in lines), file=file)  # rich pads a table's rows with spaces


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    print(jsonlib.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
