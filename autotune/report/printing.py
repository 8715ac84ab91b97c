"""How words and documents get onto a stream."""

from __future__ import annotations

import errno
import json as jsonlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..units import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

GONE = (errno.EPIPE, errno.EIO)
"""What a stream answers once its reader, or its terminal, has gone."""


def escaped(text: str) -> str:
    """Lines of anybody's words, with all else escaped that a terminal would act on."""
    return (
        text
        if text.isprintable()
        else "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    )


def tell(words: str) -> None:
    """Print lines of progress, or why it ends, on stderr; a reader that has gone ends nothing."""
    with suppress(OSError):
        print(escaped(words), file=sys.stderr)


def console(file: Any) -> Console:
    """rich's, for a stream that may go or fill up meanwhile, and for words that are anybody's."""
    from rich.console import Console
    from rich.segment import Segment

    class Careful(Console):
        def render(self, *args: Any) -> Iterator[Segment]:
            for text, style, control in super().render(*args):
                yield Segment(text if control else escaped(text), style, control)

    forgiving: Any = _Forgiving(file)
    return Careful(file=forgiving)


class _Forgiving:
    """A stream that loses what cannot be written, and nothing else."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """As the stream's own."""
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """As the stream's own."""
        with suppress(OSError):
            self._file.flush()


@contextmanager
def listened_to(file: Any) -> Iterator[None]:
    """What is printed to ``file`` is at hand at once. A reader or a terminal that has gone ends nothing.

    Raises:
        OSError: it cannot be written for another reason, such as a full disk.
    """
    try:
        yield
        file.flush()
    except OSError as error:
        if error.errno not in GONE:
            raise
        discard(file.fileno())


def discard(number: int) -> None:
    """Of a standard stream: the interpreter's end would try again to write what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def print_words(file: Any, words: RenderableType, width: int | None = None) -> None:
    """Print words; a pipe takes lines of ``width``."""
    printer = console(file)
    if width is not None and not printer.is_terminal:
        printer.width = width
    with printer.capture() as captured:
        printer.print(words)
    lines = captured.get().splitlines()
    with listened_to(file):
        print("\n".join(line.rstrip() for line in lines), file=file)  # rich pads a table's rows with spaces


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document on stdout, with what a terminal would act on written as JSON escapes."""
    text = jsonlib.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    safe = "".join(each if each.isprintable() or each == "\n" else jsonlib.dumps(each)[1:-1] for each in text)
    with listened_to(sys.stdout):
        print(safe)
