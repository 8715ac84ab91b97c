"""Which configurations may be the fastest, by their trials, and in which order they are measured again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist

from ...workers import Measured
from ..session import Session
from ..store.pace import error_of
from ..store.tried import Tried
from ..time_budget import NUM_FINALISTS
from .proof import chance

_WORTH = 0.002
"""Share of the speed that another measurement of a configuration has to be expected to bring."""
_WORTH_PROVING = 0.02
"""The same of a proof, which takes several runs."""
_PROOF = 0.1
"""What a proof costs, in speeds of the slowest."""
_UNKNOWN, _TINY = 0.5, 1e-9
"""Chance of what was not judged, and the least one."""


def finalists_of(session: Session) -> list[Tried]:
    """The first few, in the order of :func:`in_order`, without the reference, which takes turns with the winner
    anyway."""
    rows = [row for row in session.feasible if row.number != 0]
    return in_order(session, rows, session.study.log_speed)[:NUM_FINALISTS] or list(session.feasible)


def in_order(session: Session, rows: Iterable[Tried], log_speed: Callable[[Tried], float]) -> list[Tried]:
    """Configurations in the order in which they are measured again, the first that holds being the plan.

    What computes another function has to be proven first. Of what its trial shows, its speed counts, and what a proof
    costs over the chance that it comes: what fails costs no more than that, since the next is tried then.
    The fastest that needs no proof comes before those that are not expected to bring enough over it.

    Source: Weitzman 1979, Econometrica 47, 641: of boxes that may be opened in turn, that of the largest such value.
    """
    ranked = sorted(rows, key=log_speed, reverse=True)
    exact = [row for row in ranked if not row.settings.affect("function")]
    chances = {row.number: _chance(session, row) for row in ranked if row not in exact}
    lossy = [row for row in ranked if row.number in chances]
    own = [session.study.log_speed(row) for row in session.feasible if row.number == 0]
    safe = max([*map(log_speed, exact), *own], default=None)
    base = min([*own, *map(log_speed, ranked)], default=0.0)
    lossy.sort(key=lambda row: math.exp(log_speed(row) - base) - _PROOF / max(chances[row.number], _TINY), reverse=True)

    def is_worth(row: Tried) -> bool:
        return safe is None or chances[row.number] * math.expm1(log_speed(row) - safe) > _WORTH_PROVING

    return [*filter(is_worth, lossy), *exact, *(row for row in lossy if not is_worth(row))]


def rivals_of(session: Session, finalists: Sequence[Tried]) -> list[Tried]:
    """Those that are worth measuring once more, since they may come before the first by more than that costs, in their
    order. The reference counts as one of them where it can be used, and the first needs no proof."""
    if not finalists:
        return []
    is_proven = finalists[0].settings.affect("function")
    every = [row for row in finalists if row.settings.affect("function") == is_proven]
    if not is_proven and session.reference in session.feasible and session.reference not in every:
        every += [session.reference] if session.reference is not None else []
    first = finalists[0] if is_proven else max(every, key=session.study.log_speed)
    found = [row for row in every if row is first or _expected_gain(session, row, first) > _WORTH]
    return [row for row in finalists if row in found] if len(found) > 1 else []


def _worth(session: Session, row: Tried) -> float:
    """Logarithm of its speed times its chance of being proven."""
    return session.study.log_speed(row) + math.log(max(_chance(session, row), _TINY))


def _expected_gain(session: Session, row: Tried, first: Tried) -> float:
    """How much more a configuration is worth than the first on average, where less counts as nothing.

    Source: expected improvement, Jones et al. 1998, https://doi.org/10.1023/A:1008306431147
    """
    behind = _worth(session, first) - _worth(session, row)
    error = math.hypot(*(_error(session, one) for one in (row, first)))
    normal = NormalDist()
    return error * normal.pdf(behind / error) - behind * normal.cdf(-behind / error)


def _chance(session: Session, row: Tried) -> float:
    """Of being proven to lose no more than is allowed, by the trial of a configuration that computes the same; 1 where
    it needs no proof."""
    if not row.settings.affect("function"):
        return 1.0
    drop, reference = session.options.max_quality_drop, session.study.reference_quality
    judged = session.study.judged(row.settings)
    outcome = judged.outcome if judged is not None else None
    quality = outcome.measurement.quality if isinstance(outcome, Measured) else None
    if quality is None or reference is None or drop is None:
        return _UNKNOWN
    return chance([(quality, reference)], drop, are_counted=False)


def _error(session: Session, row: Tried) -> float:
    """Standard error of a trial's speed, as a logarithm, with what other work adds to it."""
    assert isinstance(row.outcome, Measured), "it is feasible"
    return math.hypot(error_of(row.outcome.measurement.samples_per_s), session.study.paces.of(row.number).error)
