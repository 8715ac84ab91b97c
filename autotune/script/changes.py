"""Files that a script's trials changed in the folder that it is run from."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["changed_since", "snapshot"]

_MOST_FILES = 20_000
_MOST_TOLD = 5
_OWN = ("__pycache__", ".autotune", ".git")
"""Folders that are not looked into."""

Snapshot = dict[str, tuple[int, int]]
"""By path: when it was changed, in nanoseconds, and its bytes."""


def snapshot(folder: Path) -> Snapshot:
    """The files of a folder and of those in it, the first so many."""
    found: Snapshot = {}
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


def changed_since(before: Snapshot, folder: Path, but: Path) -> str | None:
    """What was written there meanwhile, in words; None where nothing was but ``but``."""
    after = snapshot(folder)
    ours = os.path.relpath(but, folder)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    changed = [path for path in changed if path != ours]
    if not changed:
        return None
    more = len(changed) - _MOST_TOLD
    told = ", ".join(changed[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
    return f"the script changed files here while it was measured: {told}. Give it a folder of its own for a search."
