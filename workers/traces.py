"""Tracebacks as the user should see them: without the frames of this package and of the interpreter's start."""

from __future__ import annotations

import traceback
from pathlib import Path

import autotune

__all__ = ["traceback_of", "without_our_frames"]

# A checkout reaches workers/ through a link, so the same file has two names.
_FOLDERS = (Path(autotune.__file__).parent, Path(__file__).parent)
_OURS = ('  File "<frozen ', *(f'  File "{name}/' for folder in _FOLDERS for name in {folder, folder.resolve()}))


def traceback_of(error: BaseException) -> str:
    """The exception with its causes, as Python prints it, without our frames; with them where the fault is ours."""
    text = "".join(traceback.format_exception(error))
    shorter = without_our_frames(text)
    return shorter if '\n  File "' in shorter else text


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
