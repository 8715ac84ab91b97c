"""Leases: which server runs a search. A server takes one under a token and renews the lease; all driver results are
written under that token, and dropped once another server has the search."""

from __future__ import annotations

import json
import secrets
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, Subquery, and_, case, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from ...units import format_duration
from ..findings import Documents
from ..spec import SearchSpec
from .database import Database, now
from .events import append, held_by
from .states import ENDS, HELD, State, may_become
from .tables import SEARCHES, TRIALS

PAUSES_S = (10.0, 60.0)
"""Before the second and the third try of a search whose driver failed, seconds: a node or a disk may be back by then.
One more failure in a row, without a trial between them, is its end."""
_DAY_S = 86400.0
_LATER = 1e12
"""Seconds since 1970, after all that has happened."""
_KEPT = ("measured", "out_of_memory")
"""What the job as it stands came to: with anything else the search ended, and a resumed one measures it again."""


class Stale(Exception):
    """Another server has the search: nothing was written."""


@dataclass(frozen=True)
class Lease:
    """A search that this server may work on."""

    search_id: str
    token: str
    owner: str
    spec: SearchSpec
    attempt: int
    """1 for the first driver."""
    progress_offset: int
    """Bytes of this attempt's progress file that are events already."""
    cancel_mode: str | None
    summary: dict[str, Any]
    """Summary of what the driver said before."""
    pid: int | None
    """This attempt's driver, once it runs."""
    pid_start: int | None


class Leases:
    """The leases in a database, of the searches whose files are in this state folder."""

    def __init__(self, database: Database, home: str, lease_s: float, pauses_s: Sequence[float] = PAUSES_S) -> None:
        """Nothing is taken yet.

        Args:
            database: where searches are.
            home: the state folder's own name: a search goes on where its files are.
            lease_s: how long a lease lasts without a sign of life, seconds.
            pauses_s: before each further try after a failure, seconds.
        """
        self._database, self._home, self._lease_s, self._pauses_s = database, home, lease_s, pauses_s
        self._waits = _waits(home, max(pauses_s))
        self._next = _next(self._waits)

    def claim(self, owners: Collection[str] | None = None) -> Lease | None:
        """Take the search that is next: what is to be cancelled, then by priority; within one, of the owner with the
        fewest that run, then of the one whose turn was longest ago, then the oldest.

        Args:
            owners: whose searches may be taken; None is everybody's.

        Returns:
            The lease; None where nothing waits.
        """
        token = secrets.token_hex(16)
        chosen = self._next if owners is None else self._next.where(SEARCHES.c.owner.in_(owners))
        with self._database.writing() as connection:
            search_id = connection.scalar(chosen)
            if search_id is None:
                return None
            changes = {
                "lease_token": token,
                "lease_expires_at": now() + self._lease_s,
                "home": self._home,
                "attempt": SEARCHES.c.attempt + 1,
                "progress_offset": 0,
                "pid": None,
                "retry_at": None,
            }
            append(
                connection,
                and_(SEARCHES.c.id == search_id, self._waits),
                [("state", {"state": State.LEASED})],
                state=State.LEASED,
                **changes,
            )
            row = connection.execute(select(SEARCHES).where(held_by(search_id, token))).one()
        return _lease(row)

    def owners(self) -> list[str]:
        """Whose searches wait here."""
        with self._database.reading() as connection:
            return [*connection.scalars(select(SEARCHES.c.owner).where(self._waits).distinct())]

    def queue(self) -> list[tuple[str, str]]:
        """Ids and owners of the searches that wait here, in the order in which they begin as things stand: as
        :meth:`claim` would take them if none ended meanwhile, and each owner's could begin."""
        turns = _turns()
        told = (SEARCHES.c.id, SEARCHES.c.owner, SEARCHES.c.cancel_mode, SEARCHES.c.priority, SEARCHES.c.number)
        joined = SEARCHES.outerjoin(turns, turns.c.owner == SEARCHES.c.owner)
        query = select(*told, turns.c.num_held, turns.c.last).select_from(joined).where(self._waits)
        lines: dict[tuple[bool, int], dict[str, deque[tuple[int, str]]]] = {}
        held: Counter[str] = Counter()
        last: dict[str, float] = {}
        with self._database.reading() as connection:
            for row in connection.execute(query.order_by(SEARCHES.c.number)):
                line = lines.setdefault((row.cancel_mode is None, -row.priority), {})
                line.setdefault(row.owner, deque()).append((row.number, row.id))
                held[row.owner], last[row.owner] = row.num_held or 0, row.last or 0.0
        found: list[tuple[str, str]] = []
        for _, line in sorted(lines.items()):
            while line:
                owner = min(line, key=lambda name: (held[name], last[name], line[name][0]))
                found.append((line[owner].popleft()[1], owner))
                held[owner], last[owner] = held[owner] + 1, _LATER + len(found)
                if not line[owner]:
                    del line[owner]
        return found

    def expired(self, *, all_held: bool = False) -> list[Lease]:
        """Leases of searches here that nobody keeps alive; with ``all_held`` every one, for a server that has just
        started and is the only one."""
        which = and_(SEARCHES.c.state.in_(HELD), SEARCHES.c.home == self._home)
        if not all_held:
            which = and_(which, SEARCHES.c.lease_expires_at < now())
        with self._database.reading() as connection:
            return [_lease(row) for row in connection.execute(select(SEARCHES).where(which))]

    def keep(self, lease: Lease) -> str | None:
        """Renew the lease.

        Returns:
            How it is to be cancelled; None if it is not.

        Raises:
            Stale: it is somebody else's.
        """
        held = update(SEARCHES).where(held_by(lease.search_id, lease.token))
        renewed = held.values(lease_expires_at=now() + self._lease_s).returning(SEARCHES.c.cancel_mode)
        with self._database.writing() as connection:
            row = connection.execute(renewed).first()
        if row is None:
            raise Stale
        mode: str | None = row.cancel_mode
        return mode

    def begin(self, lease: Lease, pid: int, pid_start: int, summary: Mapping[str, Any] | None = None) -> None:
        """Note that the driver runs, and what is known of the search as it begins.

        Raises:
            Stale: the search is somebody else's.
        """
        changes: dict[str, Any] = {"pid": pid, "pid_start": pid_start, "message": ""}
        if summary is not None:
            changes["summary"] = json.dumps(summary)
        with self._database.writing() as connection:
            started = update(SEARCHES).where(held_by(lease.search_id, lease.token), SEARCHES.c.started_at.is_(None))
            connection.execute(started.values(started_at=now()))
            said = [("state", {"state": State.RUNNING, "attempt": lease.attempt})]
            whose = and_(held_by(lease.search_id, lease.token), SEARCHES.c.state == State.LEASED)
            if append(connection, whose, said, state=State.RUNNING, **changes):
                return
            said = [("driver_started", {"attempt": lease.attempt})]
            if not append(connection, held_by(lease.search_id, lease.token), said, **changes):  # it is CANCELLING
                raise Stale

    def record(self, lease: Lease, rows: Sequence[Mapping[str, Any]], offset: int, summary: Mapping[str, Any]) -> None:
        """Store what a driver has said up to ``offset`` of its progress file: all of it once, or none; again, where the
        database answered the first time with its end, changes nothing.

        Raises:
            Stale: the search is somebody else's.
        """
        events = [(str(row["event"]), {k: v for k, v in row.items() if k != "event"}) for row in rows]
        trials = [*_trials(rows)]
        changes: dict[str, Any] = {"progress_offset": offset, "summary": json.dumps(summary)}
        if trials:
            changes["failures"] = 0
        with self._database.writing() as connection:
            held = held_by(lease.search_id, lease.token)
            if not append(connection, and_(held, SEARCHES.c.progress_offset < offset), events, **changes):
                if connection.scalar(select(SEARCHES.c.id).where(held)):
                    return
                raise Stale
            if trials:
                dialect = sqlite if self._database.is_sqlite else postgresql
                known = [
                    {
                        "search_id": lease.search_id,
                        "number": row["number"],
                        "outcome": row["outcome"],
                        "data": json.dumps({k: v for k, v in row.items() if k != "event"}),
                    }
                    for row in trials
                ]
                added = dialect.insert(TRIALS)
                again = added.on_conflict_do_update(
                    index_elements=[TRIALS.c.search_id, TRIALS.c.number],
                    set_={"outcome": added.excluded.outcome, "data": added.excluded.data},
                    where=and_(TRIALS.c.number == 0, *(TRIALS.c.outcome != each for each in _KEPT)),
                )
                connection.execute(again, known)

    def finish(
        self,
        lease: Lease,
        state: State,
        message: str,
        found: Documents | None = None,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the search's result, and its summary where there is a new one.

        Raises:
            Stale: the search is somebody else's.
        """
        assert state in ENDS
        documents: dict[str, Any] = {}
        if found is not None:
            documents = {"plan": found.plan, "report": found.report, "plan_files": json.dumps(found.files)}
        if summary is not None:
            documents["summary"] = json.dumps(summary)
        self._release(lease, state, message, ended_at=now(), **documents)

    def give_back(self, lease: Lease, message: str, *, is_failure: bool) -> None:
        """Queue a search again whose server or driver was lost. After a failure there is a pause; after too many in a
        row the search ends.

        Raises:
            Stale: the search is somebody else's.
        """
        if not is_failure:
            return self._release(lease, State.QUEUED, message)
        with self._database.reading() as connection:
            failures = connection.scalar(select(SEARCHES.c.failures).where(held_by(lease.search_id, lease.token)))
        if failures is None:
            raise Stale
        most = len(self._pauses_s) + 1
        if failures + 1 >= most:
            why = f"{message} That was {most} times in a row. What was measured is kept: resume it."
            return self.finish(lease, State.ERROR, why)
        pause_s = self._pauses_s[failures]
        later = f"It is tried again in {format_duration(pause_s)} (try {failures + 2} of {most})."
        changes = {"failures": failures + 1, "retry_at": now() + pause_s}
        return self._release(lease, State.QUEUED, message, later, **changes)

    def _release(self, lease: Lease, state: State, message: str, later: str = "", **changes: Any) -> None:
        whose = and_(held_by(lease.search_id, lease.token), SEARCHES.c.state.in_(may_become(state)))
        said = [("state", {"state": state, "words": f"{message} {later}".rstrip()})]
        free = {"lease_token": None, "lease_expires_at": None}
        with self._database.writing() as connection:
            if not append(connection, whose, said, state=state, message=message, **free, **changes):
                raise Stale


def _waits(home: str, longest_pause_s: float) -> ColumnElement[bool]:
    """Of searches that a server with this state folder may take. What is to be cancelled has no pause; where one seems
    to be longer than any is, the clock has jumped."""
    here = SEARCHES.c.home.is_(None) | (SEARCHES.c.home == home)
    at = SEARCHES.c.retry_at
    is_due = or_(at.is_(None), SEARCHES.c.cancel_mode.is_not(None), at <= now(), at > now() + longest_pause_s)
    return and_(SEARCHES.c.state == State.QUEUED, here, is_due)


def _next(waits: ColumnElement[bool]) -> Select[Any]:
    """The id of the search whose turn it is, locked where the database locks rows."""
    turns = _turns()
    order = (
        case((SEARCHES.c.cancel_mode.is_(None), 1), else_=0),
        SEARCHES.c.priority.desc(),
        func.coalesce(turns.c.num_held, 0),
        func.coalesce(turns.c.last, 0.0),
        SEARCHES.c.number,
    )
    joined = SEARCHES.outerjoin(turns, turns.c.owner == SEARCHES.c.owner)
    chosen = select(SEARCHES.c.id).select_from(joined).where(waits).order_by(*order).limit(1)
    return chosen.with_for_update(skip_locked=True, of=SEARCHES)


def _turns() -> Subquery:
    """For each owner: how many searches run, and when one was last begun, within a day."""
    is_held = SEARCHES.c.state.in_(HELD)
    recent = or_(is_held, SEARCHES.c.ended_at > now() - _DAY_S)
    held = func.sum(case((is_held, 1), else_=0)).label("num_held")
    last = func.max(SEARCHES.c.started_at).label("last")
    return select(SEARCHES.c.owner, held, last).where(recent).group_by(SEARCHES.c.owner).subquery()


def _trials(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The trials' outcomes, as a driver reports them; malformed ones are left out."""
    said = (row if row["event"] == "trial_ended" else row.get("resumed") for row in rows)
    for each in (one for some in said for one in (some if isinstance(some, list) else [some])):
        if isinstance(each, dict) and isinstance(each.get("number"), int) and isinstance(each.get("outcome"), str):
            yield each


def _lease(row: Row[Any]) -> Lease:
    return Lease(
        search_id=row.id,
        token=row.lease_token,
        owner=row.owner,
        spec=SearchSpec.model_validate_json(row.spec),
        attempt=row.attempt,
        progress_offset=row.progress_offset,
        cancel_mode=row.cancel_mode,
        summary=json.loads(row.summary),
        pid=row.pid,
        pid_start=row.pid_start,
    )
