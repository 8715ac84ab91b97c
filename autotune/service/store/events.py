"""A search's events: numbered without gaps, written in the transaction of what they tell of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, insert, select, update

from .database import now
from .tables import EVENTS, SEARCHES

_MOST_BYTES = 64 * 2**10
"""Of an event's data: what a driver writes is as long as a task's words are."""


@dataclass(frozen=True)
class EventRow:
    """One event as it was stored."""

    seq: int
    """1 for a search's first."""
    at: float
    """Seconds since 1970."""
    kind: str
    data: dict[str, Any]


def held_by(search_id: str, token: str) -> ColumnElement[bool]:
    """The condition of every write under a lease: it changes no row once somebody else has the search."""
    return and_(SEARCHES.c.id == search_id, SEARCHES.c.lease_token == token)


def append(
    connection: Connection, whose: ColumnElement[bool], events: Sequence[tuple[str, Mapping[str, Any]]], **changes: Any
) -> bool:
    """Change a search, and add events to it.

    Args:
        connection: a transaction that writes.
        whose: the condition that picks the search.
        events: kinds and data.
        changes: columns of the search, and what becomes of them.

    Returns:
        Whether there was such a search; where not, nothing was written.
    """
    numbered = SEARCHES.c.num_events + len(events)
    changed = connection.execute(
        update(SEARCHES)
        .where(whose)
        .values(num_events=numbered, **changes)
        .returning(SEARCHES.c.id, SEARCHES.c.num_events)
    ).first()
    if changed is None:
        return False
    first = changed.num_events - len(events) + 1
    rows = [
        {"search_id": changed.id, "seq": first + place, "kind": kind[:40], "data": _text(data)}
        for place, (kind, data) in enumerate(events)
    ]
    if rows:
        connection.execute(insert(EVENTS).values(at=now()), rows)
    return True


def read_events(connection: Connection, search_id: str, after: int, most: int = 500) -> list[EventRow]:
    """Events with a number above ``after``, in order."""
    rows = connection.execute(
        select(EVENTS.c.seq, EVENTS.c.at, EVENTS.c.kind, EVENTS.c.data)
        .where(EVENTS.c.search_id == search_id, EVENTS.c.seq > after)
        .order_by(EVENTS.c.seq)
        .limit(most)
    )
    return [EventRow(row.seq, row.at, row.kind, json.loads(row.data)) for row in rows]


def _text(data: Mapping[str, Any]) -> str:
    text = json.dumps(data)
    return text if len(text) <= _MOST_BYTES else json.dumps({"words": f"{text[:1000]}…", "was_cut": True})
