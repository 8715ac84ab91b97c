"""A search's storage, which no other search writes to meanwhile; its content is kept even if its file is removed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import optuna

from ...errors import StudyError
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
        self.say: Callable[[str], None] = lambda words: None
        """Is called with what the user must know."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path = sqlite_path(url)
        if path is not None:
            check_file(path)
        self._was_there = path is not None and path.exists() and path.stat().st_size > 0
        self._lock = Lock(path)
        self._file: _File | None = None
        try:
            with storage_errors(url):
                self.storage = open_storage(url if path is None else at(url, path.resolve()))
                self._file = None if path is None else _File(path.resolve())
        except BaseException:
            self._lock.discard()
            self._release()
            raise

    def found_empty(self) -> str:
        """A hint why an existing file holds no study; empty if there is none."""
        if self._file is None or not self._was_there or self.storage.get_all_studies():
            return ""
        path = sqlite_path(self.url)
        return f" {path} is there, but holds no study at all: was its write-ahead log ({path}-wal) lost?"

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release the lock if the body fails."""
        try:
            yield
        except BaseException:
            self._release()
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context for writing: the file must still be the one that was opened, and the lock held.

        Raises:
            StudyError: the storage cannot be written, or the file was replaced.
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
            StudyError: the file was replaced.
        """
        try:
            self._secure()
        finally:
            self._release()

    def _secure(self) -> None:
        """Write a removed file anew, from what is still open."""
        file = self._file
        if file is None:
            return
        if not file.is_there():
            file.remove_logs()
            if file.path.exists():
                kept = file.path.with_name(f"{file.path.stem}-kept-{os.getpid()}{file.path.suffix}")
                file.copy(kept)
                raise StudyError(
                    f"{file.path}: another file was put in its place during the search, and is left as it is. All that "
                    f"was measured is kept in {kept}: put it back in its place, then go on with --resume."
                )
            file.make_folder()
            self._lock.hold()  # before anybody else begins a study there
            file.copy(file.path)
            file.close()
            self.storage.remove_session()
            self.storage.engine.dispose()
            self._file = _File(file.path)
            self.say(f"{file.path}: the study was removed during the search; it was written anew, nothing is lost.")
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
        self._connection = sqlite3.connect(path)
        self._found = os.stat(path)
        self._connection.execute("PRAGMA journal_mode = WAL")
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

    def make_folder(self) -> None:
        """Make the file's folder again, if it is gone."""
        with _lost(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def copy(self, target: Path) -> None:
        """Write all that it holds to a new file."""
        with _lost(self.path):
            try:
                with closing(sqlite3.connect(target)) as copy:
                    self._connection.backup(copy)
            except sqlite3.Error:
                target.unlink(missing_ok=True)  # half of it would be taken for a study
                raise

    def close(self) -> None:
        """The last connection that is closed folds the write-ahead file in."""
        self._connection.close()


def _is_at(found: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(found, os.stat(path))
    except OSError:
        return False


@contextmanager
def _lost(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as reason:
        raise StudyError(
            f"{path}: the study was removed during the search, and cannot be written anew: {reason}. "
            "What was measured is lost: search again where its folder stays."
        ) from None
