"""A working folder for one trial, so that a script overwrites no file of the user's: a copy of the current one, or
empty."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ..errors import UserError
from ..units import format_bytes

__all__ = ["Scratch", "found_from", "work_in"]

Scratch = Literal["copy", "empty"]

_LEFT_OUT = (".git", ".autotune", "__pycache__")
_MOST_BYTES = 2 * 2**30
"""Most bytes to copy of files that cannot share their blocks."""
_MOST_LINKS = 1000
"""To what is beside each folder that the current one is in."""
_FICLONE = 0x40049409  # linux/fs.h


def work_in(folder: Path, kind: Scratch, is_first: bool = True, most_bytes: int | None = None) -> None:
    """Make a working folder and change into it. Around a copy are links to what is around the original (``../data``).

    Args:
        folder: does not exist yet; whoever names it removes it.
        kind: with a copy of the files of the current folder, or empty.
        is_first: of several processes in one folder, the first makes it, and the others wait for it.
        most_bytes: of files that cannot share their blocks; None is 2 GiB.

    Raises:
        UserError: there is too much to copy.
        OSError: it cannot be made.
    """
    origin = Path.cwd()
    within = origin.relative_to(origin.anchor) if kind == "copy" else Path()
    if is_first:
        making = folder.with_name(f"{folder.name}.partial")
        making.mkdir()
        if kind == "copy":
            _link_around(origin, making)
            _copy(str(origin), making / within, _MOST_BYTES if most_bytes is None else most_bytes)
        making.rename(folder)
    while not folder.exists():
        time.sleep(0.01)
    os.chdir(folder / within)


def found_from(path: str, origin: str) -> str:
    """A script's path where it is not in the scratch folder: seen from the folder that the command was given in."""
    return path if os.path.exists(path) or os.getcwd() == origin else os.path.join(origin, path)


def _link_around(origin: Path, folder: Path) -> None:
    """A folder for each that the original is in, with links to all else in it."""
    for above, below in zip(reversed(origin.parents), origin.parts[1:], strict=True):
        with suppress(OSError):  # one that may not be listed
            for name in itertools.islice(os.listdir(above), _MOST_LINKS):
                if name != below:
                    (folder / name).symlink_to(above / name)
        folder /= below
        folder.mkdir()


def _copy(origin: str, folder: Path, most_bytes: int) -> None:
    """Files share their blocks with the copy until either is written, where the file system can; links stay links, to
    what they lead to now; virtual environments become links."""
    num_bytes = 0
    for where, folders, files in os.walk(origin):
        to = folder / os.path.relpath(where, origin)
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in [*folders, *files]:
            source = os.path.join(where, name)
            if os.path.islink(source) or os.path.exists(os.path.join(source, "pyvenv.cfg")):
                os.symlink(os.path.realpath(source), to / name)
            elif os.path.isdir(source):
                (to / name).mkdir()
            elif os.path.isfile(source) and not _share(source, to / name):
                num_bytes += os.path.getsize(source)
                if num_bytes > most_bytes:
                    raise UserError(
                        f"--scratch copy: {origin} holds more than {format_bytes(most_bytes)}, which would be copied "
                        "for each trial. Put large data elsewhere, with a link to it here, or use --scratch empty."
                    )
                shutil.copyfile(source, to / name)
        folders[:] = [name for name in folders if not (to / name).is_symlink()]


def _share(source: str, copy: Path) -> bool:
    """Clone a file, block for block; False where the file system cannot."""
    with open(source, "rb") as old, copy.open("wb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
        except OSError:
            return False
        return True
