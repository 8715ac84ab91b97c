"""Folders for a process's files, each held by a lock while its owner lives, so that a later one finds what is left.

A lock tells a living owner from a dead one where pids do not: in containers that share a folder and not their pids.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from ..files import lock

_OWNER = "owner"


class Scratch:
    """A new folder of this process's own."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        """Make it, and remove those that owners who are gone have left beside it.

        Args:
            prefix: what its name begins with.
            parent: where; None is where temporary files go (``TMPDIR``).

        Raises:
            OSError: it cannot be made; the message names it.
        """
        remove_abandoned(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            self._owner = lock(self.path / f"{_OWNER}.new")
            os.rename(self.path / f"{_OWNER}.new", self.path / _OWNER)  # whoever sees it finds it locked
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(AttributeError):
            self._owner.release()


def remove_abandoned(prefix: str, parent: str | None = None) -> None:
    """Remove folders whose owners are gone.

    Args:
        prefix: what their names begin with.
        parent: where they are; None is where temporary files go (``TMPDIR``).
    """
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if (folder / _OWNER).stat().st_uid == os.getuid():
                owner = lock(folder / _OWNER)
                shutil.rmtree(folder, ignore_errors=True)
                owner.release()
