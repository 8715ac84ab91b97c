"""The database: SQLite in the state folder, or PostgreSQL by its URL; its clock, its transactions, its schema."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, ExceptionContext, Float, create_engine, event, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

from ...errors import UserError
from ...searches.store.connections import set_up
from ...searches.store.url import hidden

_MIGRATION_LOCK = 0x6175746F
"""Number of the PostgreSQL advisory lock under which one server migrates at a time."""
_BUSY_MS = 30_000
_CACHE_KIB = 256
"""Of each connection with SQLite: the system caches the file for all."""
_MOST_CONNECTIONS = 64
"""Connections in the pool: more than there are threads, so that none waits and none is reopened."""


class now(GenericFunction[float]):
    """Seconds since 1970 by the database's clock: that of a server may be wrong, or jump."""

    type = Float()
    inherit_cache = True
    name = "autotune_now"


@compiles(now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql_now(element: Any, compiler: Any, **options: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


_READ_ONLY = "the database is read-only for the server, and nothing is written to it. Make it writable again"
_READ_ONLY_STATE = "25006"
"""PostgreSQL's code. Source: https://www.postgresql.org/docs/current/errcodes-appendix.html"""


class Unusable(SQLAlchemyError):
    """The database was made read-only under the running server, or SQLite's file removed or replaced; it says so in
    words."""


class Database:
    """Connections for short transactions: nothing slow, no disk and no network, happens within one."""

    def __init__(self, url: str) -> None:
        """Open it; nothing is read or written yet.

        Raises:
            UserError: the URL is malformed, or its driver is not installed.
        """
        self._url = url
        try:
            self.engine: Engine = create_engine(
                url, pool_pre_ping=not url.startswith("sqlite"), pool_size=_MOST_CONNECTIONS, max_overflow=-1
            )
        except (ArgumentError, NoSuchModuleError, ValueError):
            raise UserError(
                "--database: expected sqlite:///path.db or postgresql+psycopg://user@host/name, but got another form."
            ) from None
        except ModuleNotFoundError as missing:
            raise UserError(
                f"--database: the driver {missing.name} is not installed. Install it: pip install 'psycopg[binary]', "
                "and write postgresql+psycopg://…"
            ) from None
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        if self.is_sqlite and self.engine.url.database in (None, "", ":memory:"):
            raise UserError(
                "--database: a file was expected, sqlite:///path.db: what is in memory ends with the server."
            )
        self._writer = threading.Lock() if self.is_sqlite else None
        self._file: tuple[int, int] | None = None
        if self.is_sqlite:
            set_up(self.engine, foreign_keys="ON", busy_timeout=_BUSY_MS, cache_size=-_CACHE_KIB)
            event.listen(self.engine, "connect", _leave_transactions)
            event.listen(self.engine, "begin", _begin)
        event.listen(self.engine, "handle_error", _let_go_of_read_only)

    @property
    def path(self) -> Path | None:
        """SQLite's file."""
        return Path(self.engine.url.database or "") if self.is_sqlite else None

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that reads.

        Raises:
            Unusable: the file is another since :meth:`migrate`.
        """
        self._check_identity()
        with self.engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes, committed at its end. With SQLite they queue up for one another here.

        Raises:
            Unusable: as :meth:`check` says.
        """
        with self._writer or nullcontext(), self.engine.connect() as connection:
            self.check()
            writer = connection.execution_options(writes=True)
            with writer.begin():
                yield writer

    def migrate(self) -> None:
        """Bring the schema to this version's.

        Raises:
            UserError: it is newer, half made or of something else, or the database cannot be reached; it is as it was.
        """
        try:
            with self.writing() as connection:
                if not self.is_sqlite:
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
                config = _config()
                config.attributes["connection"] = connection
                known = {each.revision for each in ScriptDirectory.from_config(config).walk_revisions()}
                there = MigrationContext.configure(connection).get_current_revision()
                if there is not None and there not in known:
                    raise UserError(
                        f"the database has schema {there}, which a newer autotune wrote. Start that version; this one "
                        "has changed nothing."
                    )
                _upgrade(config)
            self._file = self._identity()
        except (DBAPIError, Unusable, sqlite3.Error) as reason:
            raise UserError(
                f"--database: it cannot be reached, or not written: {hidden(words_of(reason), self._url)}. Is the "
                "server up, the folder writable, and the file a database?"
            ) from None

    def _identity(self) -> tuple[int, int] | None:
        """Device and number of SQLite's file; None where there is none."""
        try:
            found = None if self.path is None else os.stat(self.path)
        except OSError:
            return None
        return found and (found.st_dev, found.st_ino)

    def check(self) -> None:
        """See that what is written now would be found again: with SQLite, and since :meth:`migrate`.

        Raises:
            Unusable: the file is another, or read-only.
        """
        self._check_identity()
        if self._file is not None and self.path is not None and not os.access(self.path, os.W_OK):
            raise Unusable(_READ_ONLY)

    def probe(self) -> None:
        """Ask it, and see that it would take what is written.

        Raises:
            Unusable: it would not.
        """
        self.check()
        with self.reading() as connection:
            asked = text("SELECT 'off'" if self.is_sqlite else "SELECT current_setting('transaction_read_only')")
            if connection.scalar(asked) == "on":
                connection.invalidate()
                raise Unusable(_READ_ONLY)

    def _check_identity(self) -> None:
        if self._file is not None and self._identity() != self._file:
            raise Unusable(
                "the database's file was removed or replaced while the server runs, and nothing is written to it. Put "
                "the file back, or start the server again with the one that is there"
            )

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    return config


def _upgrade(config: Config) -> None:
    """All of it, or nothing: it is one transaction."""
    try:
        command.upgrade(config, "head")
    except DBAPIError as reason:
        raise UserError(
            f"--database: its schema cannot be brought up to date: {words_of(reason)}. Nothing was changed. It is half "
            "made, or another program's: restore a backup, or give an empty database."
        ) from None


def words_of(reason: Exception) -> str:
    """The database's error message, without the statement and its values."""
    said = reason if isinstance(reason, sqlite3.Error | Unusable) else getattr(reason, "orig", None)
    return type(reason).__name__ if said is None else str(said).strip().partition("\n")[0][:300]


def _leave_transactions(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # they are begun by _begin


def _begin(connection: Connection) -> None:
    """A transaction that will write takes the lock at once: one that takes it later may fail whatever the timeout."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _let_go_of_read_only(context: ExceptionContext) -> None:
    """A connection that was opened while the database was read-only is so for ever: they are opened anew."""
    reason = context.original_exception
    if isinstance(reason, sqlite3.OperationalError):
        is_read_only = reason.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY
    else:
        is_read_only = getattr(reason, "sqlstate", None) == _READ_ONLY_STATE
    if is_read_only:
        context.is_disconnect = True
        raise Unusable(_READ_ONLY) from reason
