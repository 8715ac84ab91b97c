"""Searches as users see and change them. Results of a running search are written under its lease, in ``leases``."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, or_, select, true, update
from sqlalchemy.exc import IntegrityError

from ..problems import Problem
from ..spec import SearchSpec
from .database import Database, now
from .events import EventRow, append, read_events
from .states import OPEN, RESUMABLE, TERMINAL, State, may_become
from .tables import ARCHIVES, EVENTS, SEARCHES, TRIALS

CancelMode = Literal["finish", "now"]
"""``finish`` ends the running trials and writes the best so far; ``now`` ends at once."""


class Search(BaseModel):
    """A search as the service shows it."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    id: str
    number: int
    """Counts up as searches are submitted."""
    name: str
    state: State
    message: str
    """Why it ended, where it did not end with a plan."""
    priority: int
    owner: str
    """The name of the token that submitted it: with it, and as an admin, the search can be changed."""
    created_at: float
    """Seconds since 1970, as all times."""
    started_at: float | None
    ended_at: float | None
    attempt: int
    """How often a driver was started."""
    retry_at: float | None
    """While it waits after a failure: when it is tried again."""
    cancel_mode: CancelMode | None
    num_events: int
    has_plan: bool
    summary: dict[str, Any]
    """Of the trials so far: ``num_trials``, ``num_ended``, ``limit_bytes``, ``reference`` and ``best``; how far each of
    the ``phases`` is, and in which ``phase`` it is now; of its plan ``result``: gain, interval, peak, and ``words``."""
    spec: SearchSpec


@dataclass(frozen=True)
class Shown:
    """A search as JSON."""

    state: State
    owner: str
    tag: str
    """ETag: changes whenever the search does, since every change is an event."""
    body: bytes
    """:class:`Search` as JSON."""


_MOST_KEPT = 4096
_SHOWN = [column for column in SEARCHES.c if column.name not in ("plan", "report", "plan_files")]


class Searches:
    """The searches in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kept: dict[str, Shown] = {}

    def submit(self, spec: SearchSpec, owner: str, key: str | None, home: str | None = None) -> tuple[Search, bool]:
        """Queue a search.

        Args:
            spec: what to search.
            owner: who asks.
            key: the request's ``Idempotency-Key``: with one that was used before, nothing new is queued.
            home: the state folder that has its archive, whose server alone can run it; None where any can.

        Returns:
            The search, and whether it is new.

        Raises:
            Problem: 422, the key was used for another search, or the archive is not here.
        """
        text = spec.model_dump_json()
        digest = hashlib.sha256(text.encode()).hexdigest()
        scoped = None if key is None else f"{owner}/{key}"
        if scoped is not None and (found := self._by_key(scoped, digest)):
            return found, False
        search_id = secrets.token_hex(8)
        try:
            with self._database.writing() as connection:
                if spec.archive and not connection.scalar(select(ARCHIVES.c.sha256).filter_by(sha256=spec.archive)):
                    raise Problem(422, f"archive {spec.archive} is not here. PUT /v1/archives/{spec.archive} first.")
                connection.execute(
                    insert(SEARCHES).values(
                        id=search_id,
                        name=spec.title,
                        spec=text,
                        archive=spec.archive,
                        owner=owner,
                        home=home,
                        state=State.QUEUED,
                        priority=spec.priority,
                        created_at=now(),
                        idempotency_key=scoped,
                        request_sha256=digest,
                    )
                )
                append(connection, SEARCHES.c.id == search_id, [("state", {"state": State.QUEUED})])
        except IntegrityError:  # the same key, at the same time
            if scoped is not None and (found := self._by_key(scoped, digest)):
                return found, False
            raise
        return self.get(search_id), True

    def _by_key(self, scoped: str, digest: str) -> Search | None:
        with self._database.reading() as connection:
            row = connection.execute(select(*_SHOWN).where(SEARCHES.c.idempotency_key == scoped)).first()
        if row is not None and row.request_sha256 != digest:
            raise Problem(422, "this Idempotency-Key was used for another search. Use a new key for a new search.")
        return None if row is None else _view(row)

    def get(self, search_id: str) -> Search:
        """One search.

        Raises:
            Problem: 404.
        """
        with self._database.reading() as connection:
            return _view(self._row(connection, search_id))

    def shown(self, search_ids: Iterable[str]) -> dict[str, Shown]:
        """Searches as they are sent, by id; those that are not there are left out.

        What has not changed since it was asked for last is neither read nor put into words again.
        """
        with self._database.reading() as connection:
            return {each[0]: each[1] for each in self._read(connection, SEARCHES.c.id.in_([*search_ids]))}

    def _read(self, connection: Connection, which: ColumnElement[bool], most: int | None = None) -> list[Any]:
        order = () if most is None else (SEARCHES.c.number.desc(),)
        versions = select(SEARCHES.c.id, SEARCHES.c.num_events).where(which).order_by(*order).limit(most)
        tags = {row.id: f'"{row.id}-{row.num_events}"' for row in connection.execute(versions)}
        kept = {name: self._kept.get(name) for name in tags}
        changed = [name for name, tag in tags.items() if (known := kept[name]) is None or known.tag != tag]
        if changed:
            for row in connection.execute(select(*_SHOWN).where(SEARCHES.c.id.in_(changed))):
                search = _view(row)
                tag = f'"{row.id}-{row.num_events}"'
                kept[row.id] = Shown(search.state, search.owner, tag, search.model_dump_json().encode())
        if len(self._kept) > _MOST_KEPT:
            self._kept.clear()
        self._kept.update({name: kept[name] for name in changed if kept[name] is not None})
        return [(name, kept[name]) for name in tags if kept[name] is not None]

    def newest(
        self, states: Collection[State] = (), before: int | None = None, most: int = 100, **like: str | None
    ) -> list[Shown]:
        """The newest first.

        Args:
            states: those that are meant; none are all.
            before: only of smaller numbers.
            most: how many.
            like: ``owner``, who has submitted them; ``viewer``, who sees no others; ``name``, a part of theirs.
        """
        which: list[ColumnElement[bool]] = [true()]
        which += [SEARCHES.c.owner == owner for key in ("owner", "viewer") if (owner := like.get(key)) is not None]
        if (name := like.get("name")) is not None:
            which.append(SEARCHES.c.name.icontains(name, autoescape=True))
        if states:
            which.append(SEARCHES.c.state.in_(states))
        if before is not None:
            which.append(SEARCHES.c.number < before)
        with self._database.reading() as connection:
            return [shown for _, shown in self._read(connection, and_(*which), most)]

    def untold(self, home: str, within_s: float) -> list[Search]:
        """Searches of a state folder, or of none, that ended so many seconds ago at most and whose end was told
        nobody, the oldest first."""
        here = or_(SEARCHES.c.home.is_(None), SEARCHES.c.home == home)
        new = and_(
            SEARCHES.c.ended_at > now() - within_s, func.coalesce(SEARCHES.c.told_at, 0.0) != SEARCHES.c.ended_at
        )
        query = select(*_SHOWN).where(SEARCHES.c.state.in_(TERMINAL), here, new).order_by(SEARCHES.c.ended_at)
        with self._database.reading() as connection:
            return [_view(row) for row in connection.execute(query.limit(100))]

    def told(self, search_id: str, ended_at: float) -> None:
        """Note that a search's end was told."""
        which = and_(SEARCHES.c.id == search_id, SEARCHES.c.ended_at == ended_at)
        with self._database.writing() as connection:
            connection.execute(update(SEARCHES).where(which).values(told_at=ended_at))

    def counts(self) -> dict[str, int]:
        """How many there are in each state."""
        with self._database.reading() as connection:
            rows = connection.execute(select(SEARCHES.c.state, func.count()).group_by(SEARCHES.c.state))
            found = {row[0]: row[1] for row in rows}
        return {state: found.get(state, 0) for state in State}

    def events(self, search_id: str, after: int, most: int = 500) -> tuple[list[EventRow], bool]:
        """Events above a number, and whether no more will come.

        Raises:
            Problem: 404.
        """
        with self._database.reading() as connection:
            row = self._row(connection, search_id)
            events = read_events(connection, search_id, after, most)
        last = events[-1].seq if events else after
        return events, row.state in TERMINAL and last >= row.num_events

    def trials(self, search_id: str, after: int = -1, most: int = 1000) -> list[dict[str, Any]]:
        """The trials' outcomes, by their numbers.

        Raises:
            Problem: 404.
        """
        with self._database.reading() as connection:
            self._row(connection, search_id)
            rows = connection.execute(
                select(TRIALS.c.data)
                .where(TRIALS.c.search_id == search_id, TRIALS.c.number > after)
                .order_by(TRIALS.c.number)
                .limit(most)
            )
            return [json.loads(row.data) for row in rows]

    def document(self, search_id: str, what: Literal["plan", "report", "plan_files"]) -> str:
        """The plan as YAML, the report in words, or the files beside the plan as JSON of base64.

        Raises:
            Problem: 404; or 409, there is none, or none yet.
        """
        with self._database.reading() as connection:
            state = self._row(connection, search_id).state
            text = connection.scalar(select(SEARCHES.c[what]).where(SEARCHES.c.id == search_id))
        if text is None:
            when = "no plan yet." if state in OPEN else "no plan, and none will come."
            if state in RESUMABLE:
                when = f"no plan. `autotune resume {search_id}` goes on with it, which may bring one."
            raise Problem(409, f"search {search_id} is {state}: there is {when}", state=state)
        return str(text)

    def cancel(self, search_id: str, mode: CancelMode) -> Search:
        """Ask a search to end; asking again changes nothing, but ``now`` after ``finish``.

        Raises:
            Problem: 404.
        """
        with self._database.writing() as connection:
            row = self._row(connection, search_id, to_change=True)
            mine = SEARCHES.c.id == search_id
            if row.state == State.QUEUED and (row.attempt == 0 or mode == "now"):
                words = "cancelled" if row.attempt else "cancelled before it began"
                said = {"state": State.CANCELLED, "words": words}
                changes = {"state": State.CANCELLED, "message": words, "ended_at": now(), "retry_at": None}
                append(connection, and_(mine, SEARCHES.c.state == State.QUEUED), [("state", said)], **changes)
            elif row.state in OPEN and row.cancel_mode != "now" and row.cancel_mode != mode:
                held = row.state in may_become(State.CANCELLING) or row.state == State.CANCELLING
                state = State.CANCELLING if held else row.state
                said = {"state": state, "mode": mode}
                append(connection, mine, [("state", said)], state=state, cancel_mode=mode)
        return self.get(search_id)

    def set_priority(self, search_id: str, priority: int) -> Search:
        """Change the priority of a search that has not ended.

        Raises:
            Problem: 404; or 409, it has.
        """
        with self._database.writing() as connection:
            row = self._row(connection, search_id, to_change=True)
            if row.state in TERMINAL:
                raise Problem(409, f"search {search_id} is {row.state}: its priority matters no more.", state=row.state)
            append(connection, SEARCHES.c.id == search_id, [("priority", {"priority": priority})], priority=priority)
        return self.get(search_id)

    def resume(self, search_id: str, limits: Mapping[str, Any] = MappingProxyType({})) -> Search:
        """Queue a search again that ended without a result; it resumes from what was measured.

        Args:
            search_id: which.
            limits: fields of its spec that are others from now on.

        Raises:
            Problem: 404; or 409, it has a result, or goes on with other limits.
        """
        with self._database.writing() as connection:
            row = self._row(connection, search_id, to_change=True)
            if row.state in TERMINAL - RESUMABLE:
                raise Problem(
                    409, f"search {search_id} is {row.state}: there is nothing to go on with.", state=row.state
                )
            spec = SearchSpec.model_validate_json(row.spec).model_copy(update=dict(limits)).model_dump_json()
            if row.state in OPEN and spec != row.spec:
                raise Problem(
                    409, f"search {search_id} is {row.state}: its limits can be changed once it has ended, by a resume."
                )
            if row.state in RESUMABLE:
                changes = {
                    "spec": spec,
                    "message": "",
                    "ended_at": None,
                    "cancel_mode": None,
                    "failures": 0,
                    "retry_at": None,
                }
                said = {"state": State.QUEUED, "words": "resumed with other limits" if limits else "resumed"}
                append(connection, SEARCHES.c.id == search_id, [("state", said)], state=State.QUEUED, **changes)
        return self.get(search_id)

    def delete(self, search_id: str) -> None:
        """Delete a search that has ended.

        Raises:
            Problem: 404; or 409, it has not.
        """
        with self._database.writing() as connection:
            row = self._row(connection, search_id, to_change=True)
            if row.state not in TERMINAL:
                raise Problem(
                    409,
                    f"search {search_id} is {row.state}: it can be deleted once it has ended. Cancel it first.",
                    state=row.state,
                )
            for table in (EVENTS, TRIALS):
                connection.execute(delete(table).where(table.c.search_id == search_id))
            connection.execute(delete(SEARCHES).where(SEARCHES.c.id == search_id))

    @staticmethod
    def _row(connection: Any, search_id: str, *, to_change: bool = False) -> Row[Any]:
        """With ``to_change`` nobody else changes it before the transaction ends: what is decided by it stays true."""
        query = select(*_SHOWN).where(SEARCHES.c.id == search_id)
        row: Row[Any] | None = connection.execute(query.with_for_update() if to_change else query).first()
        if row is None:
            raise no_search(search_id)
        return row


def no_search(search_id: str) -> Problem:
    """What is said of an id that no search has, and of one that is not to be seen."""
    return Problem(404, f"there is no search {search_id[:40]!r}.")


def _view(row: Row[Any]) -> Search:
    fields = {name: getattr(row, name) for name in Search.model_fields if name not in ("spec", "summary", "has_plan")}
    return Search(
        spec=SearchSpec.model_validate_json(row.spec),
        summary=json.loads(row.summary),
        has_plan=row.state == State.SUCCEEDED,
        **fields,
    )
