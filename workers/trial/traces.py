"""Tracebacks as the user should see them: without the frames of this package and of the interpreter's start."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from ... import distribution
from ...errors import Caught

INNERMOST = " (innermost first):"
"""Ends a line that frames follow."""

_KEPT = 16384
"""Characters of a text at either end."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

# A checkout reaches workers/ through a link, so the same file has two names.
_FOLDERS = (Path(distribution.__file__).parent, Path(__file__).parents[1])
_OURS = ('  File "<frozen ', *(f'  File "{name}/' for folder in _FOLDERS for name in {folder, folder.resolve()}))


def traceback_of(error: BaseException) -> str:
    """The exception with its causes, as Python prints it, without our frames; with them where the fault is ours."""
    with Caught() as raised:  # what the user's exception does when it is asked for its text
        text = plain("".join(traceback.format_exception(error)))
    if raised.error is not None:
        text = plain("".join(traceback.format_tb(error.__traceback__)) + f"{type(error).__name__}: {text_of(error)}\n")
    shorter = without_our_frames(text)
    return shorter if '\n  File "' in shorter else text


def text_of(error: BaseException) -> str:
    """An exception's message, also where it cannot say it."""
    with Caught() as raised:  # a user's __str__ may do anything
        return str(error)
    return f"(its text cannot be had: {type(raised.error).__name__})"


def plain(text: str) -> str:
    """Text that a terminal and a JSON file can take: the ends of a very long one, no control characters."""
    if len(text) > 2 * _KEPT:
        text = f"{text[:_KEPT]}\n… {len(text) - 2 * _KEPT} characters left out …\n{text[-_KEPT:]}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def without_our_frames(text: str) -> str:
    """A traceback's or faulthandler dump's text, less the frames of this package, source lines included."""
    kept, dropping = [], False
    for line in text.splitlines(keepends=True):
        if line.startswith('  File "'):
            dropping = line.startswith(_OURS)
        elif not line.startswith("    "):
            dropping = False
        if not dropping:
            kept.append(line)
    return "".join(kept)


def first_line(text: str) -> str:
    """A message's first line, for where there is room for one; with the innermost frame where it announces frames."""
    line, _, rest = text.strip().partition("\n")
    if not line.endswith(INNERMOST):
        return line
    return f"{line.removesuffix(INNERMOST)} {rest.strip().partition(chr(10))[0]}".rstrip()
