"""Files that a script's trials changed in the folder that it is run from."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["Changes"]

_MOST_FILES = 20_000
_MOST_TOLD = 5
_OWN = ("__pycache__", ".autotune", ".git")
"""Folders that are not looked into."""

_Snapshot = dict[str, tuple[int, int]]
"""By path: when it was changed, in nanoseconds, and its bytes."""


class Changes:
    """Files that a script's trials write into a folder, reported once."""

    def __init__(self, folder: Path, but: Path) -> None:
        """
        Args:
            folder: that the script is run from.
            but: what is not the script's: the plan.
        """
        self._folder, self._but = folder, os.path.relpath(but, folder)
        self._before = _snapshot(folder)
        self._is_told = False

    def told(self) -> str | None:
        """What was written there since the beginning, in words; None where nothing was, or it was told before."""
        after = {} if self._is_told else _snapshot(self._folder)
        before = {} if self._is_told else self._before
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        changed = [path for path in changed if path != self._but]
        if not changed:
            return None
        self._is_told = True
        more = len(changed) - _MOST_TOLD
        names = ", ".join(changed[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
        return f"the script's trials write files here: {names}. With --scratch copy they run in a folder of their own."


def _snapshot(folder: Path) -> _Snapshot:
    """The files of a folder and of those in it, the first so many."""
    found: _Snapshot = {}
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _OWN]
        for name in files:
            path = os.path.join(where, name)
            try:
                state = os.stat(path)
            except OSError:  # gone meanwhile
                continue
            found[os.path.relpath(path, folder)] = (state.st_mtime_ns, state.st_size)
            if len(found) == _MOST_FILES:
                return found
    return found
