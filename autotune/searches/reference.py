"""Checks the reference's outcome: the job as it stands must run, and a budget may be a share of its peak."""

from __future__ import annotations

from ..errors import TaskError, UserError
from ..units import format_percent
from ..workers import Measured, OutOfMemory, TimedOut
from .budget import check_possible
from .events import BudgetKnown
from .requests import failure
from .session import Session


def check_reference(session: Session) -> None:
    """Refuse a job that does not run as it stands, other than for lack of memory.

    Raises:
        TaskError: it fails, or gains memory each step.
        UserError: the budget is a share of its peak, and that is not known or below what any process takes.
    """
    reference = session.reference
    if reference is None:
        return
    outcome, task = reference.outcome, session.options.task
    if session.not_comparable is not None:
        session.warn(f"the losses of trials are not compared with the reference's: {session.not_comparable}.")
    if isinstance(outcome, Measured):
        if outcome.measurement.leak_bytes_per_step is not None:
            raise TaskError(
                f"{task}: the job as it stands {reference.verdict.reason}, so that no configuration can be measured. "
                "A list that keeps each step's loss with its graph is the usual cause: keep loss.item()."
            )
        if session.budget.of_reference is not None:
            _tell_share(session, session.budget.of_reference)
        elif reference.verdict.over_memory:
            session.warn(
                f"the reference is {reference.verdict.reason}: the job as it stands does not fit. It was measured all "
                "the same, so that gains can be stated against it."
            )
    elif isinstance(outcome, OutOfMemory) and session.budget.of_reference is not None:
        raise UserError(
            f"--budget {format_percent(session.budget.of_reference)}: that is a share of what the job takes as it "
            f"stands, which is not known: it does not fit the device ({reference.verdict.reason}). "
            "Give a size, such as 8GiB."
        )
    elif isinstance(outcome, OutOfMemory):
        session.warn(f"the reference does not fit the device ({reference.verdict.reason}): there is no gain to state.")
    elif isinstance(outcome, TimedOut) and session.options.max_time is not None:
        raise TaskError(
            f"{task}: the job as it stands did not end within the {outcome.deadline_s:.0f} s that --max-time leaves "
            f"for it. Give it more time, unless it hangs: it was {outcome.message.removeprefix('ended while ')}"
        )
    else:
        raise TaskError(f"{task}: the job as it stands fails: {failure(outcome)}")


def _tell_share(session: Session, share: float) -> None:
    """Announce the budget in bytes, once the reference's peak is known.

    Raises:
        UserError: it is below what any process takes.
    """
    session.observe(BudgetKnown(session.budget))
    check_possible(session.budget, session.facts)
    if share > 1:
        session.warn(f"--budget {format_percent(share)} is more memory than the job takes as it stands.")
