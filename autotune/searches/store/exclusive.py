"""A search's storage, which no other search writes to meanwhile."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import optuna

from ...errors import StudyError
from .connections import connect
from .lock import Lock
from .storage import check_file, open_storage, storage_errors
from .url import at, sqlite_path


class ExclusiveStorage:
    """A storage that this process alone writes to."""

    def __init__(self, url: str) -> None:
        """Lock and open it.

        Raises:
            StudyError: it is locked, corrupt, cannot be reached, or cannot be written.
        """
        self.url = url
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path = sqlite_path(url)
        if path is not None:
            check_file(path)
        self._was_there = path is not None and path.exists() and path.stat().st_size > 0
        self._lock = Lock(path)
        self._file: _File | None = None
        with ExitStack() as undone:
            undone.callback(self._release)
            undone.callback(self._lock.discard)
            with storage_errors(url):
                self.storage = open_storage(url if path is None else at(url, path.resolve()))
                self._file = None if path is None else _File(path.resolve())
            undone.pop_all()

    def found_empty(self) -> str:
        """A hint why an existing file holds no study; empty if there is none."""
        if self._file is None or not self._was_there or self.storage.get_all_studies():
            return ""
        path = sqlite_path(self.url)
        return f" {path} is there, but holds no study at all: was its write-ahead log ({path}-wal) lost?"

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release the lock if the body fails."""
        with ExitStack() as undone:
            undone.callback(self._release)
            yield
            undone.pop_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context for writing: the file must still be the one that was opened, and the lock held.

        Raises:
            StudyError: the storage cannot be written, or its file was removed or replaced.
        """
        with storage_errors(self.url):
            self._secure()
            yield

    def checkpoint(self) -> None:
        """Write SQLite's write-ahead log into the file, which is then whole without it."""
        if self._file is not None:
            with storage_errors(self.url):
                self._file.checkpoint()

    def close(self) -> None:
        """Close the database and release the lock.

        Raises:
            StudyError: its file was removed or replaced.
        """
        try:
            if self._file is not None:
                self._secure()
        finally:
            self._release()

    def _secure(self) -> None:
        """Raises:
        StudyError: the file was removed or replaced; what it held is in a copy, if that could be written.
        """
        file = self._file
        if file is not None and not file.is_there():
            self._file = None
            try:
                said = file.keep_beside()
            finally:
                file.close()
            raise StudyError(f"{file.path}: the file was removed or replaced during the search. {said}")
        self._lock.hold()

    def _release(self) -> None:
        if hasattr(self, "storage"):
            self.storage.remove_session()
            self.storage.engine.dispose()
        if self._file is not None:
            self._file.close()
        self._lock.close()


class _File:
    """An open SQLite file, by its inode: its name may be removed, or given to another file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = connect(path)
        self._found = os.stat(path)
        self._connection.execute("SELECT name FROM sqlite_master").fetchone()  # opens all files, while they have names
        logs = (path.with_name(f"{path.name}{suffix}") for suffix in ("-wal", "-shm"))
        self._logs = {log: os.stat(log) for log in logs if log.exists()}
        self.checkpoint()

    def is_there(self) -> bool:
        """Whether the name still refers to this file."""
        return _is_at(self._found, self.path)

    def remove_logs(self) -> None:
        """Remove the file's own logs beside its old name, which SQLite would take for another file's."""
        for log, found in self._logs.items():
            if _is_at(found, log):
                log.unlink()

    def checkpoint(self) -> None:
        """Source: https://www.sqlite.org/pragma.html#pragma_wal_checkpoint"""
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def keep_beside(self) -> str:
        """Write all that it holds to a new file beside its old name, and say which."""
        self.remove_logs()
        kept = self.path.with_name(f"{self.path.stem}-kept-{os.getpid()}{self.path.suffix}")
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with closing(connect(kept)) as copy:
                self._connection.backup(copy)
        except (OSError, sqlite3.Error) as reason:
            with suppress(OSError):
                kept.unlink()  # half of it would be taken for a study
            return f"What was measured is lost, since no copy can be written: {reason}. Search again where files stay."
        return f"All that was measured is kept in {kept}: put it back in its place, then go on with --resume."

    def close(self) -> None:
        """The last connection that is closed folds the write-ahead file in."""
        self._connection.close()


def _is_at(found: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(found, os.stat(path))
    except OSError:
        return False
