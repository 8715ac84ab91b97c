"""A run beside the search's trials: known, or asked for, kept and learned from while there is time."""

from __future__ import annotations

from collections.abc import Callable

from ..workers import Outcome, Predicted, PredictRequest, TimedOut, TrialRequest
from ..workers.outcome import sides_of
from .event_base import Event
from .session import Session
from .time_budget import LEAST_SHARE_S


def run_once(
    session: Session,
    key: str,
    make: Callable[[], TrialRequest | None],
    started: Event | None = None,
    ended: Callable[[Outcome], Event] | None = None,
) -> Outcome | None:
    """The outcome of a run: the study's, or that of a run now, which the study keeps before anything else is done.

    What is measured has run before, in less time. So if it does not end within its deadline, other work on the machine
    may be why: it is asked for once more, with twice the time.

    A prediction that failed is not kept: it is asked for again on ``--resume``.

    Args:
        session: the search.
        key: under which the study has it.
        make: the request; None where there is no time for it.
        started: is observed before a run.
        ended: makes what is observed after one.

    Returns:
        None where there is no time, or it ran out meanwhile, or the user asked to stop.
    """
    stored = session.study.evidence(key)
    if stored is not None:
        return stored
    request = None if session.stop.is_set() else make()
    if request is None:
        return None
    if started is not None:
        session.observe(started)
    outcome = session.executor.ask(request)
    if not isinstance(request, PredictRequest) and _ran_out(outcome) and not session.stop.is_set():
        outcome = _asked_again(session, request, outcome)
    is_late = isinstance(outcome, TimedOut) and session.time_budget.left_s() < LEAST_SHARE_S
    if is_late or session.was_cut_off(outcome):
        return None
    if not isinstance(request, PredictRequest) or isinstance(outcome, Predicted):
        session.study.keep_evidence(key, outcome)
    session.learn(request.id, outcome, fresh=request.fresh)
    if ended is not None:
        session.observe(ended(outcome))
    return outcome


def _asked_again(session: Session, request: TrialRequest, outcome: Outcome) -> Outcome:
    left_s = session.time_budget.left_s()
    if left_s <= request.deadline_s:
        return outcome
    longer = request.with_deadline(min(2 * request.deadline_s, left_s), left_s)
    session.warn(
        f"{request.id} did not end within {request.deadline_s:.0f} s, as it did before: other work on the machine may "
        f"be why. It runs once more, for up to {longer.deadline_s:.0f} s."
    )
    return session.executor.ask(longer)


def _ran_out(outcome: Outcome) -> bool:
    """Whether a measurement, or one side of two, did not end in time."""
    return any(isinstance(side, TimedOut) for side in sides_of(outcome))
