"""A round of the winner's evidence by turns: it and the reference live at once, and one of them computes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...plan import Peak
from ...techniques import Facts
from ...workers import CompareRequest, Measured, MeasureRequest

if TYPE_CHECKING:  # the display of a search needs its memory and its seconds, and no study
    from ..session import Session
    from ..store.tried import Tried

NUM_ROUNDS_BY_TURNS, MOST_ROUNDS_BY_TURNS = 2, 4
"""Rounds, in fresh processes of both each: planned, and at most."""
_LONGEST_TURN_S, _TURNS = 1.0, 20
_ROOM = 1.1
"""Times the memory of both that there has to be."""


def can_take_turns(session: Session, candidate: Tried) -> bool:
    """Whether a candidate and the reference may live at once: one process each, whose memory is there twice. Where
    jobs of a batch share their rounds, these are no turns."""
    reference = session.reference
    if reference is None or (session.known is not None and session.known.shares_rounds):
        return False
    rows = (candidate, reference)
    if any(row.applied.parallel.processes > 1 for row in rows):
        return False
    peaks = [row.outcome.measurement.peak for row in rows if isinstance(row.outcome, Measured)]
    return have_room(peaks, session.facts)


def have_room(peaks: Sequence[Peak], facts: Facts) -> bool:
    """Whether processes of these peaks may live at once, on the device and on the host; those of several ranks may
    not."""
    is_there = _ROOM * sum(peak.process for peak in peaks) <= facts.device.memory_bytes and facts.ranks == 1
    return is_there and _ROOM * sum(peak.host or peak.process for peak in peaks) <= facts.host_memory_bytes


def turn_s(share_s: float) -> float:
    """Seconds of a turn, of ``share_s`` of timed windows for each side."""
    return min(_LONGEST_TURN_S, share_s)


def comparing(one: MeasureRequest, other: MeasureRequest, share_s: float, most_s: float) -> CompareRequest:
    """The request of a round.

    Args:
        one: the candidate's.
        other: the reference's.
        share_s: seconds of timed windows for each.
        most_s: seconds that the search has for the turns of both.
    """
    each_s = turn_s(share_s)
    wanted_s = max(2 * share_s, _TURNS * each_s)
    return CompareRequest.of(one, other, min(wanted_s, most_s)).model_copy(update={"turn_s": each_s})
