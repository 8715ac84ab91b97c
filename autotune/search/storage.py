"""Where studies are kept: opening a storage without harming what is there, and one driver at a time."""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import optuna
import sqlalchemy.event
import sqlalchemy.exc
from optuna.storages import RDBStorage

from ..errors import StudyError
from ..files import FOLDER

__all__ = [
    "Lock",
    "default_storage",
    "default_url",
    "newest_first",
    "newest_number",
    "open_storage",
    "sqlite_path",
    "storage_errors",
]


def default_storage(stem: str) -> str:
    """SQLite under ``.autotune/``, one file for each task's stem, without what a URL or a shell would misread.

    Raises:
        StudyError: the folder cannot be made.
    """
    try:
        FOLDER.mkdir(exist_ok=True)
    except OSError as reason:
        raise StudyError(
            f"{FOLDER.resolve()}: the folder for studies cannot be made: {reason.strerror}. "
            "Change to a directory that can be written, or name a database with --storage."
        ) from None
    return default_url(stem)


def default_url(stem: str) -> str:
    """The same, whether it is there or not."""
    name = re.sub(r"[^\w.-]", "_", stem)
    return f"sqlite:///{FOLDER.as_posix()}/{name}.db"


def open_storage(url: str, writes: bool = True) -> RDBStorage:
    """An Optuna storage; a file that is no study database is refused before anything is written to it.

    Args:
        url: as SQLAlchemy has it, ``sqlite:///path.db`` or ``postgresql://user@host/name``.
        writes: False leaves a file's mode of writing as it is.

    Raises:
        StudyError: the file is corrupt or something else, the server cannot be reached, or the URL is malformed.
    """
    path = sqlite_path(url)
    if path is not None and str(path) in (".", ":memory:"):
        raise StudyError(f"--storage: a file was expected, but {url!r} keeps nothing. Write sqlite:///path.db.")
    if path is not None:
        _check_sqlite(path)
    try:
        with storage_errors(url):
            storage = RDBStorage(url)
            if path is not None and writes:
                _write_ahead(storage)
            return storage
    except RuntimeError as reason:
        raise StudyError(
            f"{url}: the study is of another version of Optuna: {str(reason).splitlines()[0]} "
            "Choose another with --storage; nothing was changed in it."
        ) from None
    except (sqlalchemy.exc.ArgumentError, sqlalchemy.exc.NoSuchModuleError, ValueError) as reason:
        raise StudyError(
            f"--storage: expected sqlite:///path.db or postgresql://user@host/name, but got {url!r} ({reason})."
        ) from None
    except ImportError:
        raise StudyError(
            f"--storage {url}: its database driver is not installed. For PostgreSQL: pip install psycopg2-binary."
        ) from None


def _write_ahead(storage: RDBStorage) -> None:
    """Commit without waiting for the disk: a trial takes some twenty commits, which cost 0.2 s where each waits.

    A killed process loses nothing by it, and a power cut at most the last commits.

    Source: https://www.sqlite.org/wal.html
    """

    def configure(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    sqlalchemy.event.listen(storage.engine, "connect", configure)
    storage.engine.dispose()  # so that the connections that are open already are configured too


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL; None for a server."""
    scheme, _, rest = url.partition("://")
    return Path(rest.removeprefix("/").partition("?")[0]) if scheme.partition("+")[0] == "sqlite" else None


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """What a storage may raise, as a :class:`StudyError` with a remedy."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause or error).strip()
        raise StudyError(f"{sqlite_path(url) or url}: {reason}. {_remedy(reason)}") from None


def _remedy(reason: str) -> str:
    if "locked" in reason:
        return "Another program has the file open for writing: close it, then go on with --resume."
    if "full" in reason:
        return "Free some space, then go on with --resume; what was measured is kept."
    if "readonly" in reason or "unable to open" in reason:
        return "Make the file and its folder writable, or choose another with --storage."
    return "Move the file aside, or choose another with --storage; nothing was changed in it."


def _check_sqlite(path: Path) -> None:
    """Refuse a file that SQLite cannot read, or that holds somebody else's tables."""
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=1.0, uri=True) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            intact = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        database.close()
    except sqlite3.Error as reason:
        raise StudyError(f"{path}: not a readable study: {reason}. {_remedy(str(reason))}") from None
    if intact != "ok":
        raise StudyError(f"{path}: the study is corrupt: {intact}. {_remedy(intact)}")
    if tables and "studies" not in tables:
        raise StudyError(
            f"{path}: a study database was expected, but it holds {', '.join(sorted(tables))[:80]}. "
            "Choose another with --storage; nothing was changed in it."
        )


class Lock:
    """One driver for each SQLite file: an advisory lock beside it, which the system drops when its holder dies."""

    def __init__(self, url: str) -> None:
        """Take the lock, or say who has it.

        Raises:
            StudyError: another driver holds it, or it cannot be written (a full disk).
        """
        self._file: IO[str] | None = None
        path = sqlite_path(url)
        if path is None:
            return
        try:
            self._file = open(f"{path}.lock", "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the study
        except OSError as reason:
            raise StudyError(f"{path}: cannot be written: {reason.strerror}. Choose another with --storage.") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise StudyError(
                f"{path}: another search is using this study (process {holder}). "
                "Wait for it to end, or choose another file with --storage."
            ) from None
        try:
            self._file.truncate(0)
            os.write(self._file.fileno(), str(os.getpid()).encode())  # unbuffered: closing must not try again
        except OSError as reason:
            self._file.close()
            raise StudyError(f"{path}: cannot be written: {reason.strerror}. Choose another with --storage.") from None

    def close(self) -> None:
        """Let the next driver in."""
        if self._file is not None:
            self._file.close()
            self._file = None


def newest_number(storage: RDBStorage, stem: str) -> int:
    """Number of the newest study of ``stem``, 0 for none."""
    names = optuna.get_all_study_names(storage)
    return max(
        (int(match[1]) for name in names if (match := re.fullmatch(re.escape(stem) + r"-(\d+)", name))), default=0
    )


def newest_first(storage: RDBStorage, stem: str) -> Iterator[optuna.Study]:
    """The studies of ``stem``, the newest first."""
    for number in range(newest_number(storage, stem), 0, -1):
        with suppress(KeyError):  # deleted
            yield optuna.load_study(study_name=f"{stem}-{number}", storage=storage)
