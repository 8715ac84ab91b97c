"""Which configurations may be the fastest, by their trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from ...workers import Measured
from ..session import Session
from ..store.pace import error_of
from ..store.tried import Tried
from ..time_budget import NUM_FINALISTS
from ..verdict import UNLIKELY

_WORTH = 0.002
"""Share of the speed that another measurement of a configuration has to be expected to bring."""


def finalists_of(session: Session) -> list[Tried]:
    """The fastest few, fastest first, without the reference, which takes turns with the winner anyway. What is unlikely
    to be good enough takes many runs to fall: it comes last."""
    rows = [row for row in session.feasible if row.number != 0]
    likely = [row for row in rows if not _is_unlikely(session, row)]
    return (likely or rows)[:NUM_FINALISTS] or list(session.feasible)


def rivals_of(session: Session, finalists: Sequence[Tried]) -> list[Tried]:
    """Those that are worth measuring once more, since they may be faster than the fastest by more than that costs;
    fastest first. The reference counts as one of them where it can be used."""
    own = [session.reference] if session.reference is not None and session.reference in session.feasible else []
    every = [*finalists, *(row for row in own if row not in finalists)]
    if not every:
        return []
    first = max(every, key=session.study.log_speed)
    found = [row for row in every if row is first or _expected_gain(session, row, first) > _WORTH]
    return [row for row in finalists if row in found] if len(found) > 1 else []


def _expected_gain(session: Session, row: Tried, first: Tried) -> float:
    """How much faster than the first a configuration is on average, where slower counts as nothing.

    Source: expected improvement, Jones et al. 1998, https://doi.org/10.1023/A:1008306431147
    """
    behind = session.study.log_speed(first) - session.study.log_speed(row)
    error = math.hypot(*(_error(session, one) for one in (row, first)))
    normal = NormalDist()
    return error * normal.pdf(behind / error) - behind * normal.cdf(-behind / error)


def _is_unlikely(session: Session, row: Tried) -> bool:
    """Whether a trial of a configuration that computes the same function lost far more quality than is allowed."""
    judged = session.study.judged(row.settings)
    return judged is not None and judged.verdict.lost is not None and judged.verdict.lost[0] > UNLIKELY


def _error(session: Session, row: Tried) -> float:
    """Standard error of a trial's speed, as a logarithm, with what other work adds to it."""
    assert isinstance(row.outcome, Measured), "it is feasible"
    return math.hypot(error_of(row.outcome.measurement.samples_per_s), session.study.paces.of(row.number).error)
