"""Measurements of a task by other searches: a search begins with them, and they do not count as its trials."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..techniques import Settings
from ..workers import Outcome
from .events import TrialEnded
from .sampler.candidates import Candidates, Proposal
from .session import Session


class Known(Protocol):
    """Measurements of a task by other searches, on the same device and under the same conditions."""

    def reference(self, session: Session) -> Outcome | None:
        """The outcome of the job as it stands; None where it has to be measured."""

    def others(self, session: Session) -> Iterable[tuple[Settings, Outcome]]:
        """Of other configurations, what says something within this search's budget, which is in bytes by now."""

    def again(self, session: Session, settings: Settings, finalist_round: int) -> Outcome | None:
        """The outcome of one more run of a finalist; None where it has to be measured."""


def take_reference(session: Session, candidates: Candidates) -> None:
    """Take over the reference's outcome, if it is known."""
    outcome = session.known.reference(session) if session.known is not None else None
    if outcome is not None:
        _take(session, candidates, candidates.reference(), outcome)


def take_others(session: Session, candidates: Candidates) -> None:
    """Take over every other outcome."""
    if session.known is None or session.reference is None or session.stop.is_set():
        return
    for settings, outcome in session.known.others(session):
        if (proposal := candidates.known(settings)) is not None:
            _take(session, candidates, proposal, outcome)


def _take(session: Session, candidates: Candidates, proposal: Proposal, outcome: Outcome) -> None:
    candidates.finish(proposal)
    best = session.feasible[:1]
    number, settings = proposal.number, proposal.settings
    tried = session.study.finish(proposal.trial, number, settings, outcome, known=True)
    session.time_budget.learn(outcome, fresh=False)
    is_best = session.feasible[:1] != best
    session.observe(TrialEnded(number, settings, outcome, tried.verdict.feasible, is_best, is_known=True))
