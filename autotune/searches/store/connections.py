"""Opens SQLite's files: the studies', that of earlier measurements, and the service's. All of it is here."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine, event

_SWITCH_S, _PAUSE_S = 2.0, 0.01
"""How long another process may take to switch a file to write-ahead logging, and between two looks."""


def set_up(engine: Engine, **pragmas: object) -> None:
    """Have every connection of an engine commit without waiting for the disk: a trial takes some twenty commits, which
    cost 0.2 s where each waits. A killed process loses nothing by it, and a power cut at most the last commits.

    Args:
        engine: of a SQLite file; connections that are open already are opened again.
        pragmas: what else is set, such as ``foreign_keys="ON"``.

    Source: https://www.sqlite.org/wal.html
    """

    def configure(connection: sqlite3.Connection, record: object) -> None:
        for name, value in pragmas.items():
            connection.execute(f"PRAGMA {name} = {value}")
        _write_ahead(connection)

    event.listen(engine, "connect", configure)
    engine.dispose()


def connect(path: Path) -> sqlite3.Connection:
    """A connection to a file, which is made where there is none."""
    connection = sqlite3.connect(path)
    _write_ahead(connection)
    return connection


def examine(path: Path) -> tuple[set[str], str]:
    """The tables of a file, and what is wrong with it (``ok``: nothing); nothing is written.

    Raises:
        sqlite3.Error: it is no database, or is locked.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=1.0, uri=True)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return tables, database.execute("PRAGMA quick_check(1)").fetchone()[0]


def _write_ahead(connection: sqlite3.Connection) -> None:
    """A new file, which SQLite does not wait for if another process does the same to it at this moment: it is tried
    again."""
    ends_at = time.monotonic() + _SWITCH_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(_PAUSE_S)
    connection.execute("PRAGMA synchronous = NORMAL")
