"""Which configurations may be the fastest, by their trials."""

from __future__ import annotations

from collections.abc import Sequence

from ...workers import Measured
from ..quality import UNLIKELY
from ..session import Session
from ..store.tried import Tried
from ..time_budget import NUM_FINALISTS

__all__ = ["finalists_of", "rivals_of"]


def finalists_of(session: Session) -> list[Tried]:
    """The fastest few, fastest first, without the reference, which takes turns with the winner anyway. What is unlikely
    to be good enough takes many runs to fall: it comes last."""
    rows = [row for row in session.feasible if row.number != 0]
    likely = [row for row in rows if not _is_unlikely(session, row)]
    return (likely or rows)[:NUM_FINALISTS] or list(session.feasible)


def rivals_of(session: Session, finalists: Sequence[Tried]) -> list[Tried]:
    """Those that may be the fastest by the intervals of their trials, the reference's included where it can be used;
    fastest first."""
    ends = [_ends(session, row) for row in finalists]
    own = [session.reference] if session.reference is not None and session.reference in session.feasible else []
    least = max((low for low, _ in (*ends, *(_ends(session, row) for row in own))), default=0.0)
    return [row for row, (_, high) in zip(finalists, ends, strict=True) if high >= least]


def _is_unlikely(session: Session, row: Tried) -> bool:
    """Whether a trial of a configuration that computes the same function lost far more quality than is allowed."""
    judged = session.study.judged(row.settings)
    return judged is not None and judged.verdict.lost is not None and judged.verdict.lost[0] > UNLIKELY


def _ends(session: Session, row: Tried) -> tuple[float, float]:
    assert isinstance(row.outcome, Measured), "it is feasible"
    return session.study.paces.of(row.number).ends(row.outcome.measurement.samples_per_s)
