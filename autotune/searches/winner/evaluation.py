"""The evaluation batch of a winner: the fastest that stays within the budget beside its training, by a real trial."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

from ...measure import Measurement
from ...measure.measurement import Evaluated, EvaluationOptions
from ...plan import Evaluation
from ...units import ceil_mib
from ...workers import Measured, MeasureRequest, OutOfMemory
from ..runs import run_once
from ..session import Session
from ..store.tried import Tried
from ..time_budget import LEAST_SHARE_S, NUM_REPEATS

_DOUBLINGS = 8
"""Most doublings of the batch that trials evaluate with."""
_WORTH = 1.05
"""Times the samples per second that a larger batch has to bring."""
_SHARE = 0.25
"""Of a finalist's timed windows: what the evaluations need is a training in memory, and not its speed."""


def find_batch(session: Session, winner: Tried, share_s: float | None) -> int | None:
    """Evaluate the winner at its own batch and at doublings of it while memory lasts: in one fresh process, or in one
    run each of a script.

    Args:
        session: the search.
        winner: which fits the budget.
        share_s: a finalist's seconds of timed windows; None where there is no time for more runs.

    Returns:
        The smallest batch that is about as fast as any within the budget; None leaves the one of the trials, also where
        the task lets none be chosen.
    """
    least = session.requests.evaluation_batch(winner.settings)
    if least is None or share_s is None or session.stop.is_set():
        return None
    if session.options.command is not None:
        return _by_runs(session, winner, least)
    batches = [least << doublings for doublings in range(_DOUBLINGS + 1)]
    while len(batches) > 1:
        key = f"evaluation:{len(session.study.tried)}:{winner.number}:{batches[-1]}"
        outcome = run_once(session, key, partial(_request, session, winner, batches, share_s))
        if isinstance(outcome, Measured):
            return _chosen(outcome.measurement.evaluations, session)
        if not isinstance(outcome, OutOfMemory):
            return None
        batches = batches[: (len(batches) + 1) // 2]
    return None


def with_batch(session: Session, request: MeasureRequest, batch: int | None) -> MeasureRequest:
    """The same, with another evaluation batch in its plan; None changes nothing."""
    return request if batch is None else session.requests.evaluating(request, batch)


def evaluation_of(repeats: Sequence[Measurement]) -> Evaluation | None:
    """What a plan says of its evaluation, from the runs that it reports; None where nothing was evaluated."""
    found = [run.evaluations[0] for run in repeats if run.evaluations]
    if not found:
        return None
    whole = [one.seconds for one in found if one.is_whole]
    return Evaluation(
        batch=found[0].batch,
        seconds=float(f"{statistics.median(whole):.3g}") if whole else None,
        training=ceil_mib(max(before)) if (before := [b for one in found if (b := one.before_bytes)]) else None,
    )


def _by_runs(session: Session, winner: Tried, least: int) -> int | None:
    """A script is told its evaluation batch as it starts, so each has a run, up to one that brings nothing."""
    assert isinstance(winner.outcome, Measured), "it is feasible"
    best = _seen(winner.outcome.measurement, least)
    batch = least if best is None else 2 * least
    while batch <= least << _DOUBLINGS and not session.stop.is_set():
        found = _run_at(session, winner, batch)
        if found is None or (best is not None and _rate(found) < _WORTH * _rate(best)):
            break
        best, batch = found, 2 * batch
    return None if best is None or best.batch == least else best.batch


def _run_at(session: Session, winner: Tried, batch: int) -> Evaluated | None:
    """The winner's evaluation with this batch, in a run of its own; None where it cannot be had, or in no time."""
    key = f"evaluation:{len(session.study.tried)}:{winner.number}:{batch}"

    def make() -> MeasureRequest | None:
        share_s = session.time_budget.finalist_share_s(0, 1 + 2 * NUM_REPEATS)
        if share_s is None:
            return None
        request = session.request(f"evaluation-at-{batch}", winner.applied, share_s, finalist_round=1)
        return session.requests.evaluating(request, batch)

    outcome = run_once(session, key, make)
    if not isinstance(outcome, Measured) or session.budget.over(outcome.measurement.peak):
        return None
    return _seen(outcome.measurement, batch)


def _seen(measurement: Measurement, batch: int) -> Evaluated | None:
    """A script's evaluation with batches of this size; None where none was seen, or with others."""
    found = next(iter(measurement.evaluations), None)
    return found if found is not None and found.largest_call == batch and found.seconds else None


def _request(session: Session, winner: Tried, batches: Sequence[int], share_s: float) -> MeasureRequest:
    name = f"evaluation-{winner.number:03d}-to-{batches[-1]}"
    request = session.request(name, winner.applied, max(LEAST_SHARE_S, share_s * _SHARE), finalist_round=1)
    asked = request.options.evaluation
    assert asked is not None, "the task evaluates"
    options = EvaluationOptions(most_s=asked.most_s, batches=tuple(batches))
    return request.model_copy(
        update={
            "options": request.options.model_copy(update={"evaluation": options}),
            "deadline_s": request.deadline_s + len(batches) * asked.most_s,
        }
    )


def _chosen(found: Sequence[Evaluated], session: Session) -> int | None:
    fitting = [one for one in found if session.budget.holds(one.needed_bytes) and one.num_samples and one.seconds]
    fastest = max((_rate(one) for one in fitting), default=0.0)
    chosen = next((one.batch for one in fitting if _rate(one) * _WORTH >= fastest), None)
    return None if not found or chosen == found[0].batch else chosen


def _rate(one: Evaluated) -> float:
    return one.num_samples / one.seconds
