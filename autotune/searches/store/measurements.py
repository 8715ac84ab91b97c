"""Stores finished measurements for other searches: by task, device, versions and settings, not by budget.

One table in any database that SQLAlchemy reads. A measurement that is no longer to be trusted is not removed: a new
series begins, and only the newest is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sql
from pydantic import ValidationError
from sqlalchemy.engine import Connection
from sqlalchemy.pool import NullPool

from ...errors import StudyError
from ...techniques import Settings
from ...workers import Measured, Outcome, OutOfMemory
from ...workers.outcome import OUTCOME
from .connections import set_up
from .storage import check_file, opening, storage_errors
from .tried import trimmed
from .url import masked, sqlite_path

TRIAL = "trial"
"""How a search's own trials are run; a finalist's round has its number."""
_PATIENCE_MS = 30_000
"""How long another batch may hold SQLite's lock."""

_KEY = ("task", "device", "torch", "autotune")
_TABLE = sql.Table(
    "autotune_results",
    sql.MetaData(),
    *(sql.Column(name, sql.String(300), primary_key=True) for name in _KEY),
    sql.Column("threads", sql.Integer, primary_key=True),
    sql.Column("series", sql.Integer, primary_key=True),
    sql.Column("settings", sql.String(64), primary_key=True),
    sql.Column("run", sql.String(16), primary_key=True),
    sql.Column("stated", sql.Text, nullable=False),
    sql.Column("limit_bytes", sql.BigInteger),
    sql.Column("outcome", sql.Text, nullable=False),
    sql.Column("source", sql.String(200), nullable=False),
    sql.Column("at", sql.String(32), nullable=False),
)
"""``settings`` is a hash of what ``stated`` has in full."""


@dataclass(frozen=True)
class Key:
    """Identifies comparable measurements: those of different keys are never mixed."""

    task: str
    """Hash of the task's fingerprint, its code, and what else its trials depend on."""
    device: str
    """Type, name, memory and driver, as the worker reads them."""
    threads: int
    """That torch computes with on the CPU."""
    torch: str
    autotune: str


@dataclass(frozen=True)
class Kept:
    """One finished measurement."""

    settings: Settings
    outcome: Measured | OutOfMemory
    limit_bytes: int | None
    """The budget that it was held to; None for none."""
    source: str
    """The run of a batch, and its job, that measured it."""


class Results:
    """The table. Every call is a transaction of its own, from any thread."""

    def __init__(self, url: str) -> None:
        """Open it, and make it where there is none.

        Raises:
            StudyError: the URL is malformed; the database is corrupt, cannot be reached or cannot be written.
        """
        self._url = url
        path = sqlite_path(url)
        if path is not None:
            check_file(path)
        with opening(url):
            self._engine = sql.create_engine(url, poolclass=NullPool)
            if path is not None:
                set_up(self._engine, busy_timeout=_PATIENCE_MS)
            if not sql.inspect(self._engine).has_table(_TABLE.name):
                with self._engine.begin() as database:  # another search may create it at this moment
                    database.execute(sql.schema.CreateTable(_TABLE, if_not_exists=True))

    def series(self, key: Key) -> int:
        """The newest series, 0 for none."""
        with self._transaction() as database:
            return database.scalar(sql.select(sql.func.max(_TABLE.c.series)).where(*_of(asdict(key)))) or 0

    def known(self, key: Key, series: int, run: str = TRIAL) -> dict[str, Kept]:
        """A series' measurements of one kind of run, by ``settings.canonical()``."""
        wanted = _of({**asdict(key), "series": series, "run": run})
        with self._transaction() as database:
            rows = database.execute(sql.select(_TABLE).where(*wanted).order_by(_TABLE.c.at)).all()
        try:
            found = [
                Kept(
                    Settings.model_validate_json(row.stated),
                    OUTCOME.validate_json(row.outcome),  # type: ignore[arg-type]
                    row.limit_bytes,
                    row.source,
                )
                for row in rows
            ]
        except ValidationError:
            raise StudyError(
                f"{masked(self._url)}: holds measurements that this version does not read. Move it aside."
            ) from None
        return {one.settings.canonical(): one for one in found}

    def keep(self, key: Key, series: int, one: Kept, run: str = TRIAL) -> None:
        """Store a measurement in place of an earlier one; an out-of-memory does not replace a measurement."""
        place = {**asdict(key), "series": series, "run": run, "settings": _hash(one.settings)}
        row = {
            **place,
            "stated": one.settings.model_dump_json(exclude_defaults=True),
            "limit_bytes": one.limit_bytes,
            "outcome": trimmed(one.outcome).model_dump_json(),
            "source": one.source,
            "at": datetime.now(UTC).isoformat(),
        }
        with self._transaction() as database:
            stored = database.scalar(sql.select(_TABLE.c.outcome).where(*_of(place)))
            if stored is None or not _says_more(OUTCOME.validate_json(stored), one.outcome):
                database.execute(sql.delete(_TABLE).where(*_of(place)))
                database.execute(sql.insert(_TABLE).values(row))

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with storage_errors(self._url), self._engine.begin() as database:
            yield database


def _of(values: Mapping[str, Any]) -> list[sql.ColumnElement[bool]]:
    return [_TABLE.c[name] == value for name, value in values.items()]


def _says_more(stored: Outcome, new: Outcome) -> bool:
    if isinstance(new, Measured):
        return False
    least = new.peak_bytes if isinstance(new, OutOfMemory) else 0
    return isinstance(stored, Measured) or (isinstance(stored, OutOfMemory) and stored.peak_bytes > least)


def _hash(settings: Settings) -> str:
    return hashlib.sha256(settings.canonical().encode()).hexdigest()
