"""A round of the winner's evidence by turns: it and the reference live at once, and one of them computes at a time."""

from __future__ import annotations

from ...measure.timing.turns import FEWEST_TURNS
from ...workers import CompareRequest, Measured, MeasureRequest
from ..session import Session
from ..store.tried import Tried

__all__ = ["MOST_ROUNDS_BY_TURNS", "NUM_ROUNDS_BY_TURNS", "can_take_turns", "comparing"]

NUM_ROUNDS_BY_TURNS, MOST_ROUNDS_BY_TURNS = 2, 4
"""Rounds, in fresh processes of both each: planned, and at most."""
_LONGEST_TURN_S, _TURNS = 1.0, 20
_ROOM = 1.1
"""Times the memory of both that there has to be."""


def can_take_turns(session: Session, candidate: Tried) -> bool:
    """Whether a candidate and the reference may live at once: one process each, whose memory is there twice. Where
    other searches have measured the job, rounds of theirs are taken over, which are no turns."""
    reference = session.reference
    if reference is None or session.known is not None or session.facts.ranks > 1:
        return False
    rows = (candidate, reference)
    if any(row.applied.parallel.processes > 1 for row in rows):
        return False
    peaks = [row.outcome.measurement.peak for row in rows if isinstance(row.outcome, Measured)]
    is_there = _ROOM * sum(peak.process for peak in peaks) <= session.facts.device.memory_bytes
    return is_there and _ROOM * sum(peak.host or peak.process for peak in peaks) <= session.facts.host_memory_bytes


def comparing(one: MeasureRequest, other: MeasureRequest, share_s: float, is_short: bool) -> CompareRequest:
    """The request of a round.

    Args:
        one: the candidate's.
        other: the reference's.
        share_s: seconds of timed windows for each.
        is_short: whether the search has to end by a given time.
    """
    turn_s = min(_LONGEST_TURN_S, share_s / FEWEST_TURNS)
    most_s = 2 * share_s if is_short else max(2 * share_s, _TURNS * turn_s)
    return CompareRequest.of(one, other, most_s).model_copy(update={"turn_s": turn_s})
