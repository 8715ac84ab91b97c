"""Faults of the database: locked, read-only, stopped, connections cut, its clock, and what is written too late."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
from sqlalchemy import create_engine, text

from autotune.service.findings import Documents
from autotune.service.spec import SearchSpec
from autotune.service.store.database import Database
from autotune.service.store.leases import Lease, Leases, Stale
from autotune.service.store.states import State
from tests.full_disk import read_only

from .core import Fault
from .scene import LEASE_S, Scene
from .servers import kill_server

_HOUR_S = 3600.0


def lock_database(the: Scene) -> None:
    """SQLite's write lock is held past the lease."""
    with closing(sqlite3.connect(the.state / "service.db", isolation_level=None, timeout=30)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        the.go()
        time.sleep(LEASE_S + 0.5)
        connection.execute("ROLLBACK")


def _make_read_only(the: Scene) -> None:
    """It and its folder are read-only past the lease, for all that is opened meanwhile."""
    with read_only(the.state):
        time.sleep(LEASE_S + 0.5)
    the.go()


def _jump_forward(the: Scene) -> None:
    """The clock is an hour ahead: every lease is over at once, and its server is still there."""
    the.set_clock(_HOUR_S)
    time.sleep(0.3)
    the.go()


def _jump_back(the: Scene) -> None:
    """The clock is an hour behind."""
    the.set_clock(-_HOUR_S)
    time.sleep(0.3)
    the.go()


def _jump_back_and_kill(the: Scene) -> None:
    """The lease of a server that is dead lasts an hour: the next takes it all the same."""
    the.set_clock(-_HOUR_S)
    kill_server(the)


def _is_read(the: Scene) -> bool:
    row = the.row(the.search_id)
    said = the.path(the.search_id) / f"progress-{row['attempt']}.jsonl"
    return bool(row["progress_offset"] == (said.stat().st_size if said.exists() else 0))


def _write_late(the: Scene) -> None:
    """Whatever may be written under a lease, under one that is somebody else's."""
    the.until(lambda: _is_read(the), "what was said to be read")
    database = Database(the.url)
    before = the.row(the.search_id)
    leases, now = Leases(database, (the.state / "home").read_text(), LEASE_S), time.time()
    spec = SearchSpec(task="model.py", folder="/x")
    old = Lease(the.search_id, "0" * 32, "bench", spec, 1, 0, None, {}, None, None)
    row = {"event": "trial_ended", "number": int(now), "outcome": "measured"}
    late: tuple[Callable[[], object], ...] = (
        lambda: leases.keep(old),
        lambda: leases.begin(old, 1, 1),
        lambda: leases.record(old, [row], 10, {}),
        lambda: leases.finish(old, State.SUCCEEDED, "", Documents("no plan")),
        lambda: leases.finish(old, State.ERROR, "late"),
        lambda: leases.give_back(old, "late", is_failure=True),
    )
    for write in late:
        with pytest.raises(Stale):
            write()
    database.close()
    after = the.row(the.search_id)
    changed = {key for key, was in before.items() if after[key] != was}
    assert changed <= {"lease_expires_at"}, changed
    the.go()


def _stop(the: Scene) -> None:
    """PostgreSQL goes as in a crash, past the lease, and comes back."""
    assert the.cluster is not None
    the.cluster.stop("immediate")
    the.go()
    time.sleep(LEASE_S + 0.5)
    the.cluster.start()


def _cut(the: Scene) -> None:
    """PostgreSQL ends each of our connections that is within a transaction, again and again."""
    engine = create_engine(str(the.url), isolation_level="AUTOCOMMIT")
    query = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND xact_start IS NOT NULL AND pid <> pg_backend_pid()"
    )
    until = time.monotonic() + LEASE_S
    with engine.connect() as connection:
        the.go()
        while time.monotonic() < until:
            connection.execute(text(query))
    engine.dispose()


def _cut_before_commit(the: Scene) -> None:
    """What is written waits for a row that another has, and then its connection is cut."""
    engine = create_engine(str(the.url))
    with engine.connect() as holder, engine.connect() as cutter:
        holder.execute(text("SELECT id FROM searches FOR UPDATE"))
        the.go()
        time.sleep(0.3)
        waiting = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        assert cutter.scalar(text(waiting)), "nothing waits"
    engine.dispose()


def _refuse_schema(the: Scene, change: str, words: str) -> None:
    """While there is no server the schema becomes another: the next refuses it, and changes nothing. Then it is put
    back."""
    the.server.end(signal.SIGKILL)
    path = the.state / "service.db"
    was = the.row(the.search_id)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        kept = path.read_bytes()
        connection.executescript(change)
    with pytest.raises(RuntimeError, match=words):
        the.restart()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (other := the.folder / "changed.db").write_bytes(kept)
    with closing(sqlite3.connect(other)) as changed, closing(sqlite3.connect(path)) as left:
        changed.executescript(change)
        assert [*left.iterdump()] == [*changed.iterdump()], "the refused database was changed"
    path.write_bytes(kept)
    assert the.row(the.search_id) == was
    the.restart()
    the.go()


_NEWER = "UPDATE alembic_version SET version_num = '9999'"
_HALF_MADE = "DELETE FROM alembic_version; DROP TABLE trials"


FAULTS = (
    Fault("database locked past the lease", lock_database),
    Fault("database read-only past the lease", _make_read_only),
    Fault("clock an hour ahead", _jump_forward),
    Fault("clock an hour behind", _jump_back),
    Fault("clock an hour behind, server killed", _jump_back_and_kill),
    Fault("writes under a stale token", _write_late),
    Fault("a newer schema", partial(_refuse_schema, change=_NEWER, words="which a newer autotune wrote")),
    Fault("a schema half made", partial(_refuse_schema, change=_HALF_MADE, words="It is half made")),
    Fault("PostgreSQL stopped past the lease", _stop, on_postgresql=True),
    Fault("PostgreSQL cuts connections", _cut, on_postgresql=True),
    Fault("PostgreSQL cuts what is not committed", _cut_before_commit, on_postgresql=True),
)
