"""Files that a script's trials changed in the folder that it is run from."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..measure.processes import stat_of

_MOST_FILES = 20_000
_MOST_TOLD = 5
_OWN = ("__pycache__", ".autotune", ".git")
"""Folders that are not looked into."""

_Snapshot = dict[str, tuple[int, int]]
"""By path: when it was changed, in nanoseconds, and its bytes."""


class Changes:
    """Files that a script's trials write into a folder, reported once."""

    def __init__(self, folder: Path, *but: Path) -> None:
        """
        Args:
            folder: that the script is run from.
            but: what is written there and is not the script's: the plan. Nor is what this command's output goes to.
        """
        self._folder, self._but = folder, {os.path.relpath(path, folder) for path in but}
        self._before, self._output = _snapshot(folder), set(_open_files())
        self._is_told = False

    def told(self) -> str | None:
        """What was written there since the beginning, in words; None where nothing was, or it was told before."""
        after = {} if self._is_told else _snapshot(self._folder)
        before = {} if self._is_told else self._before
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        changed = [path for path in changed if path not in self._but and not self._is_output(path)]
        if not changed:
            return None
        self._is_told = True
        more = len(changed) - _MOST_TOLD
        names = ", ".join(changed[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
        return f"the script's trials write files here: {names}. With --scratch copy they run in a folder of their own."

    def _is_output(self, path: str) -> bool:
        with suppress(OSError):  # gone meanwhile
            return _identity(os.stat(self._folder / path)) in self._output
        return False


def _open_files() -> Iterator[tuple[int, int]]:
    """Files that this process, those that it came of and its process group have open: a log that a shell, ``tee`` or a
    scheduler writes of this command. Of other processes' nothing is known without ``/proc``."""
    for folder in ("/dev/fd", *(f"/proc/{pid}/fd" for pid in _around())):
        with suppress(OSError):  # it has ended, or is another user's
            for name in os.listdir(folder):
                with suppress(OSError):
                    found = os.stat(f"{folder}/{name}")
                    if stat.S_ISREG(found.st_mode):
                        yield _identity(found)


def _around() -> Iterator[int]:
    """Process ids above this one, and those of its process group."""
    pid, group = os.getppid(), str(os.getpgrp())
    while pid > 0:
        yield pid
        pid = int(*stat_of(pid)[1:2])  # 0 of one that has ended
    for folder in Path("/proc").glob("[0-9]*"):
        if stat_of(int(folder.name))[2:3] == [group]:
            yield int(folder.name)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


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
