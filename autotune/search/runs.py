"""A run beside the search's trials: known, or asked for, kept and learned from while there is time."""

from __future__ import annotations

from collections.abc import Callable

from ..workers import Outcome, Predicted, PredictRequest, TimedOut, TrialRequest
from .events import Event
from .session import Session
from .time_budget import LEAST_SHARE_S

__all__ = ["run_once"]


def run_once(
    session: Session,
    key: str,
    make: Callable[[], TrialRequest | None],
    started: Event | None = None,
    ended: Callable[[Outcome], Event] | None = None,
) -> Outcome | None:
    """The outcome of a run: the study's, or that of a run now, which the study keeps before anything else is done.

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
    is_late = isinstance(outcome, TimedOut) and session.time_budget.left_s() < LEAST_SHARE_S
    if is_late or session.was_cut_off(outcome):
        return None
    if not isinstance(request, PredictRequest) or isinstance(outcome, Predicted):
        session.study.keep_evidence(key, outcome)
    session.learn(request.id, outcome, fresh=request.fresh)
    if ended is not None:
        session.observe(ended(outcome))
    return outcome
