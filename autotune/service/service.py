"""Builds the service from its parts."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import BaseFileLock
from sqlalchemy import delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from ..errors import UserError
from ..files import lock, read_text, write_text
from .problems import Problem
from .runner import Runner
from .spec import SearchSpec
from .store.database import Database, now
from .store.leases import Leases
from .store.searches import Searches
from .store.states import TERMINAL
from .store.tables import ARCHIVES, SEARCHES
from .store.tokens import Caller, Role, Tokens
from .supervisor import Places, RunnerOptions
from .users import Users

_LOG = logging.getLogger("autotune.service")
DATABASE = "service.db"
"""SQLite's file in the state folder."""


@dataclass(frozen=True)
class Service:
    """All that a request may need."""

    database: Database
    searches: Searches
    tokens: Tokens
    home: str
    """The state folder's own name."""
    places: Places
    runner: Runner
    users: Users | None
    """Whose processes tasks are; None is the server's own user."""
    shared: tuple[Path, ...]
    """Folders that submits may name paths in."""
    private: bool
    """Others' searches are seen by admins alone."""
    locks: tuple[BaseFileLock, ...]
    sent: set[tuple[str, str]] = field(default_factory=set)
    """Who has sent which archive since the start."""

    def may_use(self, caller: Caller, sha256: str) -> bool:
        """Whether an archive is here, and they have sent it, or have a search with it: lists show its hash to all, and
        that is no key to another's code."""
        if not (self.places.archives / sha256).is_file():
            return False
        if caller.role is Role.admin or (caller.name, sha256) in self.sent:
            return True
        own = select(SEARCHES.c.id).where(SEARCHES.c.archive == sha256, SEARCHES.c.owner == caller.name).limit(1)
        with self.database.reading() as connection:
            return connection.scalar(own) is not None

    def check_place(self, spec: SearchSpec, caller: Caller) -> None:
        """Refuse a search whose files are not here: another server with this database has folders of its own.

        Raises:
            Problem: 422, so it is.
        """
        if spec.archive is not None and not self.may_use(caller, spec.archive):
            raise Problem(422, f"archive {spec.archive} is not here. PUT /v1/archives/{spec.archive} first.")
        if spec.folder is None:
            return
        real = Path(os.path.realpath(spec.folder))
        if not any(real.is_relative_to(root) for root in self.shared):
            said = ", ".join(map(str, self.shared)) or "none"
            raise Problem(422, f"folder: a path in a shared folder was expected ({said}). Submit an archive instead.")
        if not os.path.isdir(real):  # Path.is_dir raises where a name is too long
            raise Problem(422, f"folder: {spec.folder} is no folder here.")

    def check_user(self, owner: str) -> None:
        """Refuse an owner whose tasks can be nobody's processes.

        Raises:
            Problem: 403, so it is.
        """
        if self.users is not None and self.users.find(owner) is None:
            raise Problem(403, self.users.why_none(owner))

    def find_archive(self, sha256: str) -> dict[str, Any] | None:
        """An archive that is kept; None where it is not."""
        with self.database.reading() as connection:
            row = connection.execute(select(ARCHIVES).where(ARCHIVES.c.sha256 == sha256)).first()
        return None if row is None or not (self.places.archives / sha256).is_file() else row._asdict()

    def keep_archive(self, row: dict[str, Any]) -> None:
        """Say that an archive is kept, and was put now."""
        dialect = sqlite if self.database.is_sqlite else postgresql
        with self.database.writing() as connection:
            added = dialect.insert(ARCHIVES).values(**{**row, "created_at": now()})
            connection.execute(
                added.on_conflict_do_update(index_elements=[ARCHIVES.c.sha256], set_={"created_at": now()})
            )

    def delete(self, search_id: str) -> None:
        """Delete a search, with its files.

        Raises:
            Problem: 404; or 409, it has not ended.
        """
        self.searches.delete(search_id)
        shutil.rmtree(self.places.search(search_id).path, ignore_errors=True)

    def close(self) -> None:
        """End what runs, and let go of everything."""
        self.runner.close()
        self.database.close()
        for held in self.locks:
            held.release()


def open_service(
    state: Path, url: str | None, options: RunnerOptions, *, shared: tuple[Path, ...] = (), private: bool = False
) -> Service:
    """Open the state folder and the database, and bring the schema up to date. The runner is not started.

    Args:
        state: the folder of files.
        url: of the database; None is SQLite in ``state``.
        options: how searches are run.
        shared: folders that submits may name paths in.
        private: others' searches are seen by admins alone.

    Raises:
        UserError: another server uses them, or they cannot be used.
    """
    database, locks = open_database(state, url)
    places, home = Places(state), _home(state)
    if options.run_as is not None:
        options.run_as.let_pass(state)
    elif state.stat().st_mode & 0o011:  # an earlier server let a user pass
        state.chmod(0o700)
    for part in places.archives.glob(".*.part"):  # of uploads when the last server was killed
        part.unlink()
    leases = Leases(database, home, options.lease_s, options.pauses_s)
    runner = Runner(leases, places, options)
    roots = tuple(Path(os.path.realpath(root)) for root in shared)
    return Service(
        database, Searches(database), Tokens(database), home, places, runner, options.run_as, roots, private, locks
    )


def open_database(state: Path, url: str | None, *, alone: bool = True) -> tuple[Database, tuple[BaseFileLock, ...]]:
    """The database, with its schema up to date; and the locks that say that this process uses it.

    Args:
        state: the folder of files, made where it is not there.
        url: of the database; None is SQLite in ``state``.
        alone: refuse where another server uses either.

    Raises:
        UserError: they cannot be used.
    """
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (mode := stat.S_IMODE(state.stat().st_mode)) & 0o066:
            raise UserError(
                f"--state {state}: a folder that its owner alone may use was expected, since jobs' code and results "
                f"are in it, but its mode is {mode:o}. Close it: chmod 700 {shlex.quote(str(state))}"
            )
        for name in ("archives", "searches"):
            (state / name).mkdir(exist_ok=True)
        database = Database(url or f"sqlite:///{state}/{DATABASE}")
        locks = [hold(state / "lock")] if alone else []
        if alone and database.path is not None:
            path = database.path.resolve()  # whatever state folder another server has
            locks.append(hold(path.with_name(f"{path.name}.lock")))
    except OSError as reason:
        raise UserError(f"--state {state}: it cannot be used: {reason.strerror}. Choose another folder.") from None
    database.migrate()
    return database, tuple(locks)


def hold(path: Path) -> BaseFileLock:
    """Lock a file for this server.

    Raises:
        UserError: another has it.
    """
    try:
        return lock(path)
    except TimeoutError:
        raise UserError(f"{path}: another server uses this. Stop it first, or choose another folder.") from None


def _home(state: Path) -> str:
    """The state folder's own name, whatever it is called by.

    Raises:
        UserError: it cannot be read or written.
    """
    path = state / "home"
    with suppress(FileNotFoundError):
        if home := read_text(path, "state folder's name", UserError).strip():
            return home
    write_text(path, secrets.token_hex(16), UserError, "--state")
    return _home(state)


def forget_old(service: Service, keep_s: float) -> tuple[int, int]:
    """Forget what ended, was last put, or predicted, more than ``keep_s`` seconds ago; and folders as old of searches
    that no database has any more.

    Returns:
        Searches and archives that were forgotten.
    """
    here = or_(SEARCHES.c.home.is_(None), SEARCHES.c.home == service.home)  # another server has the others' files
    old = select(SEARCHES.c.id).where(SEARCHES.c.state.in_(TERMINAL), SEARCHES.c.ended_at < now() - keep_s, here)
    with service.database.reading() as connection:
        searches = [row.id for row in connection.execute(old)]
    for search_id in searches:
        with suppress(Problem):  # somebody resumed or deleted it
            service.delete(search_id)
    folders = [*(service.places.state / "searches").iterdir()]
    with service.database.reading() as connection:
        kept = {row.id for row in connection.execute(select(SEARCHES.c.id))}
    for folder in folders:
        if folder.name not in kept and _age_s(folder) > keep_s:
            shutil.rmtree(folder, ignore_errors=True)
    needed = select(SEARCHES.c.archive).where(SEARCHES.c.archive.is_not(None))
    unused = delete(ARCHIVES).where(ARCHIVES.c.created_at < now() - keep_s, ARCHIVES.c.sha256.not_in(needed))
    with service.database.writing() as connection:
        connection.execute(unused)
        known = {row.sha256 for row in connection.execute(select(ARCHIVES.c.sha256))}
    files = (path for path in service.places.archives.iterdir() if not path.name.startswith("."))
    old_files = [path for path in files if path.name not in known and _age_s(path) > keep_s]
    predictions = (path for path in service.places.predictions.glob("*.json") if _age_s(path) > keep_s)
    for path in (*old_files, *predictions):  # another server may have deleted the row
        path.unlink(missing_ok=True)
    if searches or old_files:
        _LOG.info("forgotten: %d searches, %d archives", len(searches), len(old_files))
    return len(searches), len(old_files)


def _age_s(path: Path) -> float:
    """Seconds since a file or a folder was written; 0 where it has gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
