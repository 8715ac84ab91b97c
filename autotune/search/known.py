"""Measurements of a task by other searches: a search begins with them, and they do not count as its trials."""

from __future__ import annotations

from ..workers import Outcome
from .events import TrialEnded
from .sampler.candidates import Candidates, Proposal
from .session import Session


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
