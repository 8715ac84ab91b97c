"""Files of ours: read only where they are small regular files, written whole or not at all, and locked."""

from __future__ import annotations

import fcntl  # for a file that is being written and has no name, which `lock` needs
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .errors import UserError
from .units import shortened

if TYPE_CHECKING:
    from filelock import BaseFileLock

FOLDER = Path(".autotune")
"""Beside the current directory: the default storage, the trials' output, and the memory models."""

MAX_BYTES = 2**18
"""Of a file that is read: a plan takes some 2 kB, and so much is parsed and refused in about a second."""
_PREFIX, _SUFFIX = ".autotune-", ".tmp"
"""Of names that files have while they are written."""


def hash_of(path: Path) -> str:
    """``sha256:`` and the digest of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def read_text(path: Path, what: str, error: type[UserError]) -> str:
    """The text of a regular file of at most 256 KiB: neither a device without an end nor a pipe is waited for.

    Args:
        path: what to read.
        what: it should be, such as ``plan``.
        error: raised for anything else.

    Raises:
        FileNotFoundError: there is no such file.
        error: it cannot be read, is no regular file, is too large, or is no UTF-8.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_BYTES + 1) if is_regular else b""
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as reason:  # a null byte in the path is the latter
        said = getattr(reason, "strerror", None) or reason
        raise error(f"{shortened(str(path))}: cannot be read as a {what}: {said}.") from None
    if not is_regular:
        raise error(f"{path}: cannot be read as a {what}: a regular file was expected.")
    if len(content) > MAX_BYTES:
        raise error(f"{path}: cannot be read as a {what}: it holds more than {MAX_BYTES} bytes.")
    try:
        return content.decode()
    except UnicodeDecodeError as reason:
        raise error(f"{path}: cannot be read as a {what}: {reason}.") from None


def write_text(path: Path, text: str, error: type[UserError], option: str = "-o") -> None:
    """Write a file atomically (another file in its folder, fsync, then its name).

    Raises:
        error: the path cannot be written; what stood there before is untouched.
    """
    with _told(path, error, option):
        target = _target(path)
        _sweep(target.parent)
        if _write_unlisted(target, text):
            return
    with replacing(path, error, option) as temporary, _told(path, error, option), temporary.open("wb") as file:
        _write(file, text)


@contextmanager
def replacing(path: Path, error: type[UserError], option: str = "-o") -> Iterator[Path]:
    """An empty file beside ``path``, to be filled; it takes ``path``'s place once the body has ended well.

    What a killed process left of one is removed by the next that writes there.

    Args:
        path: what is to be there in the end.
        error: raised when the path cannot be written; what stood there before is untouched.
        option: the command's, that chooses another path.
    """
    with _told(path, error, option):
        target = _target(path)
        _sweep(target.parent)
        handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=target.parent)
    with ExitStack() as undone:
        undone.callback(_unlink, name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # it is not swept while this process lives
            yield Path(name)
            with _told(path, error, option):
                os.chmod(name, 0o666 & ~_umask())
                os.replace(name, target)
        finally:
            os.close(handle)
        undone.pop_all()


def _unlink(name: str) -> None:
    with suppress(OSError):  # its folder may be gone
        os.unlink(name)


def _target(path: Path) -> Path:
    """Where a file is written, through a link into what it names; its folder is made."""
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _write_unlisted(target: Path, text: str) -> bool:
    """Write a file that no folder lists until it is whole, so that a killed process leaves nothing.

    Returns:
        False where the file system or the kernel has no such files.

    Source: open(2), O_TMPFILE
    """
    try:
        handle = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except (AttributeError, OSError):
        return False
    with open(handle, "wb") as file:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _write(file, text)
        try:
            _link(handle, target)
        except FileExistsError:  # a link replaces nothing: for a moment the file needs a name of its own
            name = target.with_name(f"{_PREFIX}{os.getpid()}{_SUFFIX}")
            _link(handle, name)
            os.replace(name, target)
        except OSError:
            return False
    return True


def _link(handle: int, target: Path) -> None:
    os.link(f"/proc/self/fd/{handle}", target, src_dir_fd=handle, follow_symlinks=True)  # linkat follows, link does not


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode())
    file.flush()
    os.fsync(file.fileno())


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed had begun to write."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError), path.open("rb") as file:  # another's, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def lock(path: Path, on_acquired: Callable[[int], None] | None = None) -> BaseFileLock:
    """Lock a file until it is released or this process ends. What is forked meanwhile does not hold it.

    Args:
        path: the file; it is made where there is none, and stays.
        on_acquired: called with the file's descriptor.

    Raises:
        TimeoutError: another holds it.
        OSError: the file cannot be opened, or its folder is not there.
    """
    from filelock import FileLock  # only here: a trial or a job would be charged for its hooks

    os.stat(path.parent)  # filelock makes a folder that is missing
    held = FileLock(path, thread_local=False, on_acquired=on_acquired)
    held.acquire(blocking=False)
    return held


def check_output(path: Path, taken: Mapping[str, Path | None], error: type[UserError], option: str = "-o") -> None:
    """Find out, before anything runs, that a result cannot be written or would take the place of something else.

    Args:
        path: where it would go.
        taken: what is there already and must stay, by what it is.
        error: raised if so it is.
        option: the command's, that chooses another path.
    """
    with _told(path, error, option):
        real = Path(os.path.realpath(path))  # Path.resolve raises for a link to itself
        if real.is_symlink() or (path.exists() and not path.is_file()):
            what = "a folder" if path.is_dir() else "no regular file"
            raise error(f"{path}: a file was expected, but it is {what}. Choose another path with {option}.")
        for name, other in taken.items():
            if other is not None and str(real) == os.path.realpath(other):
                raise error(f"{path}: that is {name} itself. Choose another path with {option}.")
        if real.is_relative_to(FOLDER.resolve()):
            raise error(f"{path}: {FOLDER} holds the studies. Choose another path with {option}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=real.parent):
            pass


@contextmanager
def _told(path: Path, error: type[UserError], option: str) -> Iterator[None]:
    try:
        yield
    except OSError as reason:
        raise error(
            f"{path}: cannot be written: {reason.strerror or reason}. Choose another path with {option}."
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
