"""A working folder for one trial, so that a script overwrites no file of the user's: a copy of the current one, or
empty."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import UserError
from ..units import ceil_mib, format_bytes

Scratch = Literal["auto", "copy", "empty", "off"]

_LEFT_OUT = (".git", ".autotune", "__pycache__")
_MOST_BYTES = 2 * 2**30
"""Most bytes to copy of files that cannot share their blocks."""
_SMALL_BYTES, _SMALL_ENTRIES = 256 * 2**20, 5000
"""Of a folder that is copied without being asked."""
_MADE_BYTES = 4 * 2**20
"""New files of so many bytes are told of."""
_MOST_LINKS = 1000
"""To what is beside each folder that the current one is in."""
_FICLONE = 0x40049409  # linux/fs.h


def work_in(folder: Path, kind: Scratch, is_first: bool = True) -> str | None:
    """Make a working folder and change into it. Around a copy are links to what is around the original (``../data``).

    Args:
        folder: does not exist yet; whoever names it removes it.
        kind: a copy of the current folder, or an empty one. ``auto`` is a copy where that folder is small, and can be
            read; else, and where it is ``off``, the current folder stays.
        is_first: of several processes in one folder, the first makes it, and the others wait for it.

    Returns:
        Why the current folder stays; None where it does not.

    Raises:
        UserError: there is too much to copy.
        OSError: it cannot be made.
    """
    if kind == "off":
        return "--scratch off has trials write where the script does"
    origin = Path.cwd()
    within = Path() if kind == "empty" else origin.relative_to(origin.anchor)
    if is_first:
        try:
            _make(folder, kind, origin)
        except (UserError, OSError):
            if kind != "auto":
                raise
            folder.symlink_to(origin.anchor)  # where all of them find the current one again
    while not folder.exists():
        time.sleep(0.01)
    os.chdir(folder / within)
    return "the script's folder is too large to be copied, or cannot be read" if folder.is_symlink() else None


def found_from(path: str, origin: str) -> str:
    """A script's path where it is not in the scratch folder: seen from the folder that the command was given in."""
    return path if os.path.exists(path) or os.getcwd() == origin else os.path.join(origin, path)


def made_in(folder: Path) -> dict[str, int]:
    """Bytes of the files in and around a copy of the current folder that the original does not have, by path, largest
    first; none where the current folder stayed."""
    if folder.is_symlink():
        return {}
    root, new = Path(folder.anchor), dict[str, int]()
    for path, kind in _entries(folder):
        with suppress(OSError):  # one that is gone meanwhile, or may not be seen
            if kind == "file" and not (root / path).exists():
                new[str(root / path)] = (folder / path).stat().st_size
    return dict(sorted(new.items(), key=lambda item: -item[1]))


def made_words(made: dict[str, int]) -> str | None:
    """That each trial makes such files anew (a dataset that the script downloads); None where they are small."""
    if (num_bytes := sum(made.values())) < _MADE_BYTES:
        return None
    size, more = format_bytes(ceil_mib(num_bytes)), f" and {len(made) - 1} more" if len(made) > 1 else ""
    return (
        f"before its first step the script makes {size} of files ({next(iter(made))}{more}). "
        "Each trial makes them anew, in a scratch folder. Run the script once by itself, which keeps them; or search "
        "with --scratch off."
    )


class _Entry(NamedTuple):
    path: str
    """Relative to the folder that it is in."""
    kind: Literal["file", "folder", "link"]
    """A virtual environment becomes a link."""


def _entries(folder: Path) -> Iterator[_Entry]:
    """What is copied of a folder, each folder before what is in it."""
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in [*folders, *files]:
            source = os.path.join(where, name)
            path = os.path.relpath(source, folder)
            if os.path.islink(source) or os.path.exists(os.path.join(source, "pyvenv.cfg")):
                folders[:] = [other for other in folders if other != name]
                yield _Entry(path, "link")
            elif os.path.isdir(source):
                yield _Entry(path, "folder")
            elif os.path.isfile(source):
                yield _Entry(path, "file")


def _make(folder: Path, kind: Scratch, origin: Path) -> None:
    making = folder.with_name(f"{folder.name}.partial")
    if kind == "auto" and not _is_small(origin):
        raise UserError(f"{origin} is too large to be copied unasked.")
    making.mkdir()
    if kind != "empty":
        _link_around(origin, making)
        _copy(origin, making / origin.relative_to(origin.anchor))
    making.rename(folder)


def _is_small(folder: Path) -> bool:
    num_bytes = 0
    for number, (path, kind) in enumerate(_entries(folder), 1):
        num_bytes += (folder / path).stat().st_size if kind == "file" else 0
        if number > _SMALL_ENTRIES or num_bytes > _SMALL_BYTES:
            return False
    return True


def _link_around(origin: Path, folder: Path) -> None:
    """A folder for each that the original is in, with links to all else in it."""
    for above, below in zip(reversed(origin.parents), origin.parts[1:], strict=True):
        with suppress(OSError):  # one that may not be listed
            for name in itertools.islice(os.listdir(above), _MOST_LINKS):
                if name != below:
                    (folder / name).symlink_to(above / name)
        folder /= below
        folder.mkdir()


def _copy(origin: Path, folder: Path) -> None:
    """Files share their blocks with the copy until either is written, where the file system can; links stay links, to
    what they lead to now."""
    num_bytes = 0
    for path, kind in _entries(origin):
        source, to = origin / path, folder / path
        if kind == "link":
            to.symlink_to(source.resolve())
        elif kind == "folder":
            to.mkdir()
        else:
            if not _share(source, to):
                num_bytes += source.stat().st_size
                if num_bytes > _MOST_BYTES:
                    raise UserError(
                        f"--scratch copy: {origin} holds more than {format_bytes(_MOST_BYTES)}, which would be copied "
                        "for each trial. Put large data elsewhere, with a link to it here, or use --scratch empty."
                    )
                shutil.copyfile(source, to)
            shutil.copystat(source, to)


def _share(source: Path, copy: Path) -> bool:
    """Clone a file, block for block; False where the file system cannot."""
    with source.open("rb") as old, copy.open("wb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
        except OSError:
            return False
        return True
