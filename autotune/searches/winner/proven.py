"""A finalist's quality from as many seeds as it takes, in one process beside the job as it stands: rounds in fresh
interpreters are then for speed and memory alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from ...measure.cuts.types import JudgeOptions
from ...workers import CutsJudged, JudgeRequest
from ..requests import exactness
from ..runs import run_once
from ..session import Pairs, Session
from ..store.tried import Tried
from ..time_budget import MOST_ROUNDS, NUM_REPEATS
from .final import run_name

_PART = 0.5
"""Largest share of the time that is left that it takes."""


def prove(session: Session, row: Tried, is_unknown: Callable[[Pairs], bool]) -> Pairs:
    """Qualities of a finalist and of the reference.

    What was judged before any trial counts, where the finalist is set to nothing else that rounds or changes results,
    unless weights are to be kept: those of then are gone.

    Args:
        session: the search.
        row: the finalist.
        is_unknown: whether more seeds would tell.

    Returns:
        From 3 seeds, or 6; fewer or none where that cannot be had: each round in a fresh interpreter then judges both.
    """
    known = () if session.options.keep_weights else session.judged(row.settings)
    plain = (type(one)() for one in row.settings.techniques() if "function" in one.affects)
    pairs: Pairs = known if exactness(row.settings.having(*plain), session.facts) == "exact" else ()
    for number in (NUM_REPEATS, MOST_ROUNDS):
        if len(pairs) < number and (len(pairs) < NUM_REPEATS or is_unknown(pairs)):
            pairs = [*pairs, *_judged(session, row, len(pairs), number)]
    return pairs


def _judged(session: Session, row: Tried, begun: int, ended: int) -> Pairs:
    """From further seeds: of the reference those qualities that are known are not measured again."""
    numbers = range(begun, ended)
    reference = [one for one, _ in session.judged(session.reference_settings)][begun:ended]
    settings = row.applied.having(session.reference_settings.parallel)
    which = hashlib.sha256(settings.canonical().encode()).hexdigest()[:12]
    keep = str(session.weights_file(run_name(row, 1))) if session.options.keep_weights and not begun else None

    def make() -> JudgeRequest | None:
        if session.time_budget.finalist_share_s(0, 1) is None:
            return None
        left_s = session.time_budget.left_s()
        options = JudgeOptions(
            recovery=session.quality_options(is_reference=True).model_copy(update={"keep": keep}),
            seeds=tuple(session.options.seed + number for number in numbers),
            candidates=(settings,),
            reference=tuple(reference) if len(reference) == len(numbers) else (),
            most_s=None if math.isinf(left_s) else max(_PART * left_s, 1.0),
        )
        name = f"proof-{row.number:03d}-of-{ended}"
        return session.requests.judge_request(name, session.reference_settings, options, session.time_budget)

    outcome = run_once(session, f"proven:{which}:{begun}:{ended}{':kept' if keep else ''}", make)
    if not isinstance(outcome, CutsJudged):
        return ()
    found = outcome.found
    for note in found.notes:
        session.warn(note)
    if (why := found.cuts[0].ended) is not None:
        session.warn(f"trial {row.number} cannot be judged beside the job as it stands: {why}")
    return [*zip(found.cuts[0].qualities, found.reference.qualities, strict=False)]
