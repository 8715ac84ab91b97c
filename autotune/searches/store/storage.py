"""Where studies are kept: opening a storage without harming what is there."""

from __future__ import annotations

import re
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import optuna
import sqlalchemy.exc
from optuna.storages import RDBStorage

from ...errors import StudyError
from ...files import FOLDER
from .connections import examine, set_up
from .url import hidden, masked, sqlite_path


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
    """The URL of the default storage, whether or not it exists."""
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
    if path is not None:
        _check_sqlite(path)
    try:
        with opening(url):
            storage = RDBStorage(url)
            if path is not None and writes:
                set_up(storage.engine)
            return storage
    except RuntimeError as reason:
        raise StudyError(
            f"{masked(url)}: the study is of another version of Optuna: {hidden(str(reason), url).splitlines()[0]} "
            "Choose another with --storage; nothing was changed in it."
        ) from None


@contextmanager
def opening(url: str) -> Iterator[None]:
    """Turns what is wrong with a URL, its driver or its database into :class:`StudyError`, with a remedy."""
    try:
        with storage_errors(url):
            yield
    except (sqlalchemy.exc.ArgumentError, sqlalchemy.exc.NoSuchModuleError, TypeError, ValueError) as reason:
        raise StudyError(
            "--storage: expected sqlite:///path.db or postgresql://user@host/name, but got "
            f"{masked(url)!r} ({hidden(str(reason), url)})."
        ) from None
    except ImportError as reason:
        missing = getattr(reason.__cause__ or reason, "name", None)
        known = " (psycopg[binary] for postgresql+psycopg://)" if url.startswith("postgresql") else ""
        raise StudyError(
            f"--storage {masked(url)}: its database driver, the module {missing}, is not installed. Install it with "
            f"pip: SQLAlchemy's documentation names the package{known}."
        ) from None


@contextmanager
def read_storage(url: str) -> Iterator[RDBStorage]:
    """A storage that is there, to be read while a search may be writing to it; without a lock, and nothing is written.

    Raises:
        StudyError: as :func:`open_storage`, or it is locked.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_storage(url, writes=False)
    try:
        with storage_errors(url):
            yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turns the errors of a storage into :class:`StudyError`, with a remedy."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError, sqlite3.Error) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        reason = hidden(str(getattr(cause, "orig", None) or cause or error).strip(), url)
        path = sqlite_path(url)
        raise StudyError(f"{path or masked(url)}: {reason}. {_remedy(reason, path is not None)}") from None


def _remedy(reason: str, is_file: bool = True) -> str:
    if not is_file:
        return "Check the server, its address and the user, or choose another with --storage; what was stored is kept."
    if "locked" in reason:
        return "Another program has the file open for writing: close it, then go on with --resume."
    if "full" in reason:
        return "Free some space, then go on with --resume; what was measured is kept."
    if "readonly" in reason or "unable to open" in reason:
        return "Make the file and its folder writable, or choose another with --storage."
    return "Move the file aside, or choose another with --storage; nothing was changed in it."


def check_file(path: Path, option: str = "--storage") -> None:
    """Refuse a path that is not a regular file with a single name; it may be missing.

    Raises:
        StudyError: so it is.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    except OSError as reason:
        raise StudyError(f"{path}: cannot be read: {reason.strerror}. Choose another with {option}.") from None
    if not stat.S_ISREG(found.st_mode):
        raise StudyError(f"{path}: a file was expected, but it is none. Write sqlite:///path.db.")
    if found.st_nlink > 1:
        raise StudyError(
            f"{path}: the file has {found.st_nlink} names (hard links). SQLite keeps its journal next to one, so that "
            f"searches by two would damage it. Copy it (cp {path} other.db), or remove the other names."
        )


def _check_sqlite(path: Path) -> None:
    """Refuse a file that SQLite cannot read, or that holds somebody else's tables."""
    check_file(path)
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        tables, intact = examine(path)
    except sqlite3.Error as reason:
        raise StudyError(f"{path}: not a readable study: {reason}. {_remedy(str(reason))}") from None
    if intact != "ok":
        raise StudyError(f"{path}: the study is corrupt: {intact}. {_remedy(intact)}")
    if tables and "studies" not in tables:
        raise StudyError(
            f"{path}: a study database was expected, but it holds {', '.join(sorted(tables))[:80]}. "
            "Choose another with --storage; nothing was changed in it."
        )


def newest_number(storage: RDBStorage, stem: str) -> int:
    """Number of the newest study of ``stem``, 0 for none.

    Raises:
        StudyError: of some study there, whosever it is, what is stored cannot be read.
    """
    try:
        names = optuna.get_all_study_names(storage)
    except ValueError as reason:  # Optuna reads all that is stored with each
        url = storage.url
        raise StudyError(
            f"{sqlite_path(url) or masked(url)}: a study there is not of this version: {hidden(str(reason), url)}. "
            "Choose another with --storage; nothing was changed in it."
        ) from None
    return max(
        (int(match[1]) for name in names if (match := re.fullmatch(re.escape(stem) + r"-(\d+)", name))), default=0
    )


def newest_first(storage: RDBStorage, stem: str) -> Iterator[optuna.Study]:
    """The studies of ``stem``, the newest first."""
    for number in range(newest_number(storage, stem), 0, -1):
        with suppress(KeyError):  # deleted
            yield optuna.load_study(study_name=f"{stem}-{number}", storage=storage)


def newest_of(storage: RDBStorage, stem: str, fingerprint: str) -> optuna.Study:
    """The newest study of the task, or of the stem where none is the task's."""
    found = list(newest_first(storage, stem))
    return next((study for study in found if study.user_attrs.get("fingerprint", fingerprint) == fingerprint), found[0])
