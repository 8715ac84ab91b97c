"""Archives of jobs' folders: tar, plain or gzipped, named by their SHA-256. Whatever is in one stays in its folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import secrets
import tarfile
import zlib
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Self

from ..errors import UserError
from ..units import format_bytes
from .problems import Problem

_LONGEST_NAME_BYTES = 64 * 2**10
"""Of a header that names the next member, which tarfile reads into memory as a whole."""
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
_NAMING = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME)
_LEFT_OUT = {".git", ".venv", "venv", "__pycache__", ".autotune", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


@dataclass(frozen=True)
class Limits:
    """Limits of an archive."""

    archive_bytes: int = 256 * 2**20
    members: int = 10_000
    file_bytes: int = 512 * 2**20
    total_bytes: int = 2**30
    """Unpacked."""
    path_bytes: int = 400
    depth: int = 32


@dataclass(frozen=True)
class Unpacked:
    """Number of files and bytes of an archive, unpacked."""

    num_files: int
    num_bytes: int


def pack(folder: Path, limits: Limits = Limits(), left_out: Collection[Path] = ()) -> bytes:
    """A folder as an archive that is the same whenever its files are; links are followed within the folder, and caches,
    environments and version control left out.

    Args:
        folder: what is packed.
        limits: the service's.
        left_out: resolved paths of files and folders in it that are left out too.

    Raises:
        UserError: a file cannot be read, or there is more than the service takes.
    """
    paths, packed = sorted(_files(folder, left_out, limits.members)), io.BytesIO()
    if len(paths) > limits.members or sum(path.stat().st_size for path in paths) > limits.total_bytes:
        raise _too_much(folder, limits)
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for path in paths:
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())
            info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            try:
                with path.open("rb") as file:
                    info.size = os.fstat(file.fileno()).st_size
                    tar.addfile(info, file)
            except OSError as reason:
                raise UserError(f"{path}: it cannot be sent: {reason.strerror or reason}. Move it aside.") from None
            if packed.tell() > limits.archive_bytes:
                break
    if packed.tell() > limits.archive_bytes:
        raise _too_much(folder, limits)
    return packed.getvalue()


def _too_much(folder: Path, limits: Limits) -> UserError:
    return UserError(
        f"{folder.resolve()}: a folder of at most {limits.members:,} files and {format_bytes(limits.total_bytes)} was "
        f"expected, or {format_bytes(limits.archive_bytes)} once it is packed. Keep data and weights elsewhere, or "
        "send another folder with --folder."
    )


def _files(folder: Path, left_out: Collection[Path], most: int) -> Iterator[Path]:
    """The first few: one more than ``most``, where there are as many."""
    root, found = folder.resolve(), 0
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            each for each in folders if each not in _LEFT_OUT and Path(parent, each).resolve() not in left_out
        ]
        for path in (Path(parent, name) for name in names):
            real = path.resolve()
            if path.is_file() and real.is_relative_to(root) and real not in left_out:
                yield path
                found += 1
            if found > most:
                return


async def receive(body: AsyncIterator[bytes], sha256: str, folder: Path, limits: Limits) -> tuple[Path, int]:
    """Write a request's body to a file of its own in ``folder``; the caller gives it its name, or removes it.

    Returns:
        The file, and its bytes.

    Raises:
        Problem: 413, it is too large; 422, it has another hash; 507, there is no room.
    """
    target = folder / f".{secrets.token_hex(8)}.part"
    digest, size = hashlib.sha256(), 0
    with ExitStack() as undone:
        undone.callback(target.unlink, missing_ok=True)
        with _room(), target.open("xb") as file:
            async for chunk in body:
                size += len(chunk)
                if size > limits.archive_bytes:
                    raise Problem(413, f"an archive may have {limits.archive_bytes} bytes. Leave out data and weights.")
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != sha256:
            raise Problem(422, f"the body's SHA-256 is {digest.hexdigest()}, not {sha256}. Was it cut off?")
        undone.pop_all()
    return target, size


def unpack(archive: Path, folder: Path | None, limits: Limits) -> Unpacked:
    """Unpack an archive into a new folder, or with None only look whether it could be.

    Raises:
        Problem: 422, it is none, or holds what is refused: links, devices, absolute paths, ``..``, a name twice, or
            more than the limits; 507, there is no room.
    """
    if folder is not None:
        folder.mkdir(parents=True)
    num_files = total = 0
    seen: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    with _told(), _stream(archive, limits) as stream, tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
        for num_members, member in enumerate(tar, 1):
            path = _path(member.name, limits)
            if said := tar.pax_headers.keys() - {"comment"}:  # `git archive` says a commit
                raise Problem(422, f"the archive says of all its members: {_shown(', '.join(sorted(said)))}.")
            if num_members > limits.members:
                raise Problem(422, f"the archive has more than {limits.members} members. Leave out data.")
            if member.size > limits.file_bytes:
                raise Problem(422, f"{_shown(member.name)} has {member.size} bytes; {limits.file_bytes} is the most.")
            total += member.size
            if total > limits.total_bytes:
                raise Problem(422, f"unpacked, the archive has more than {limits.total_bytes} bytes.")
            if path in seen:
                raise Problem(422, f"{_shown(member.name)} is in the archive twice.")
            folders.update(path.parents, [path] if member.isdir() else [])
            if not member.isdir():
                if path in folders:
                    raise Problem(422, f"{_shown(member.name)} is a file where there is a folder.")
                seen.add(path)
                num_files += 1
            if any(parent in seen for parent in path.parents):
                raise Problem(422, f"{_shown(member.name)} lies in a file.")
            if folder is not None:
                _write(tar, member, folder / path)
    if num_files == 0:
        raise Problem(422, "the archive holds no file. A tar, plain or gzipped, was expected.")
    return Unpacked(num_files, total)


class _Member(tarfile.TarInfo):
    """A header, refused before anything is made of it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """As tarfile's own.

        Raises:
            Problem: 422, so it is.
        """
        member = super().frombuf(buf, encoding, errors)
        if member.type in _NAMING:
            if member.size > _LONGEST_NAME_BYTES:
                raise Problem(422, "the archive has a header that is longer than any name.")
        elif member.type not in _PLAIN:
            raise Problem(422, f"{_shown(member.name)} is a link or a special file. Only files and folders are taken.")
        if member.size < 0:
            raise Problem(422, f"{_shown(member.name)} has a negative size.")
        return member


class _Bounded(io.RawIOBase):
    """A stream that ends with a refusal: a few bytes may come to any number when they are unzipped."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._file, self._left = file, most

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """As a file's own.

        Raises:
            Problem: 422, it goes on and on.
        """
        data = self._file.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise Problem(422, "unpacked, the archive is larger than is taken.")
        return data


@contextmanager
def _stream(archive: Path, limits: Limits) -> Iterator[IO[bytes]]:
    with archive.open("rb") as file:
        is_zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        source: IO[bytes] = gzip.GzipFile(fileobj=file) if is_zipped else file  # type: ignore[assignment]
        most = limits.total_bytes + (limits.members + 2) * (1024 + _LONGEST_NAME_BYTES // 8)
        yield _Bounded(source, most)  # type: ignore[misc]


def _path(name: str, limits: Limits) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable() or not path.parts:
        raise Problem(422, f"{_shown(name)} is no plain path within a folder.")
    if len(os.fsencode(name)) > limits.path_bytes or len(path.parts) > limits.depth:
        raise Problem(422, f"{_shown(name)} is too long, or too deep.")
    if any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise Problem(422, f"{_shown(name)} has a name that no file can have.")
    return path


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """No link is ever made in a new folder, so that nothing leads out of it."""
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    source = tar.extractfile(member)
    assert source is not None
    with os.fdopen(os.open(target, flags, 0o755 if member.mode & 0o100 else 0o644), "wb") as file:
        while chunk := source.read(2**20):
            file.write(chunk)


@contextmanager
def _told() -> Iterator[None]:
    try:
        with _room():
            yield
    except (
        tarfile.TarError,
        zlib.error,
        EOFError,
        gzip.BadGzipFile,
        UnicodeError,
        ValueError,
        OverflowError,
        RecursionError,  # of one header for the next, which tarfile reads within one another
    ) as reason:
        raise Problem(
            422, f"the archive cannot be read: {str(reason)[:200]}. A tar, plain or gzipped, was expected."
        ) from None
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as reason:
        raise Problem(
            422, f"the archive has a file where it has a folder: {_shown(str(reason.filename)[-80:])}."
        ) from None


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError, gzip.BadGzipFile):
        raise
    except OSError as reason:
        raise Problem(507, f"the service cannot keep the archive: {reason.strerror}. Nothing was kept.") from None


def _shown(name: str) -> str:
    return repr(name[:80])
