"""The states of a search, and the table of transitions."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """State of a search."""

    QUEUED = "QUEUED"
    """It waits for a free place."""
    LEASED = "LEASED"
    """A server has taken it, and gets its files ready."""
    RUNNING = "RUNNING"
    """Its driver runs."""
    CANCELLING = "CANCELLING"
    """Its driver was asked to end."""
    SUCCEEDED = "SUCCEEDED"
    """There is a plan."""
    NOTHING_FITS = "NOTHING_FITS"
    """Every configuration was over the budget, or there was no time to try any."""
    FAILED = "FAILED"
    """What was submitted is at fault; the message says how."""
    ERROR = "ERROR"
    """The service is at fault: its machine, or a bug."""
    CANCELLED = "CANCELLED"
    """Somebody cancelled it, before there was a plan."""


ENDS = frozenset({State.SUCCEEDED, State.NOTHING_FITS, State.FAILED, State.ERROR, State.CANCELLED})
"""States that a driver may end in."""

NEXT: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.LEASED, State.CANCELLED}),
    State.LEASED: frozenset({State.QUEUED, State.RUNNING, State.CANCELLING}) | ENDS,
    State.RUNNING: frozenset({State.QUEUED, State.CANCELLING}) | ENDS,
    State.CANCELLING: frozenset({State.QUEUED}) | ENDS,
    State.SUCCEEDED: frozenset(),
    State.NOTHING_FITS: frozenset(),
    State.FAILED: frozenset({State.QUEUED}),
    State.ERROR: frozenset({State.QUEUED}),
    State.CANCELLED: frozenset({State.QUEUED}),
}
"""Transitions from each state. A held one goes back to QUEUED if its server or driver was lost, an end if somebody
resumes the search."""

TERMINAL = ENDS
OPEN = frozenset(State) - TERMINAL
HELD = frozenset(state for state in OPEN if state is not State.QUEUED)
"""A server holds the lease."""
RESUMABLE = frozenset(state for state in TERMINAL if NEXT[state])


def may_become(state: State) -> frozenset[State]:
    """The states that ``state`` may follow."""
    return frozenset(before for before, after in NEXT.items() if state in after)
