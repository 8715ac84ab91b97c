"""Runs the trials of a search: keeps every slot busy with the best candidate, until there is a reason to stop."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from concurrent.futures import Future

from ..errors import TaskError, TrialsLost, UserError
from ..units import format_percent
from ..workers import STOPPED, Measured, Outcome, OutOfMemory, TimedOut, ended, result_of
from .anchors import Anchors
from .budget import check_possible
from .doubt import Doubt
from .events import INTERRUPTED, BudgetKnown, TrialEnded, TrialStarted
from .predicted.predictions import foresee
from .requests import failure, refuse_killed
from .runs import run_once
from .sampler.candidates import Candidates, Part, Proposal
from .sampler.configuration_space import ConfigurationSpace
from .sampler.expected_gain import EXHAUSTED
from .sampler.separable import Separable
from .session import OUTPUTS, Session
from .time_budget import LEAST_SHARE_S
from .verdict import is_spoiled

TIME_IS_UP = "the time was used up"


def explore_whole(
    session: Session, candidates: Candidates, space: ConfigurationSpace, doubt: Doubt, anchors: Anchors
) -> str:
    """Run trials, of the model as it is and of models that compute something else by turns, until there is a reason to
    stop; return it, in words."""
    name = session.options.sampler
    separable = Separable(session.study, space, session.facts)
    fixed = separable.base(session.reference_settings) if name == "gain" else {}
    whole = space.narrowed(fixed)
    same = whole.as_it_is() if name == "gain" else None
    session.foreseen = foresee(session, *filter(None, (same, whole)))
    candidates.use(name, session.foreseen, fixed, separable.unconfirmed, session.is_tight)
    return explore(session, candidates, doubt, anchors)


def measure_first(session: Session, candidates: Candidates, propose: Callable[[], Proposal]) -> None:
    """Run one trial to its end, before any other: the reference.

    Raises:
        TrialsLost: what runs trials failed, or killed it: nothing is stored.
    """
    share_s = session.time_budget.trial_share_s(session.options.trials) or LEAST_SHARE_S
    proposal = propose()
    outcome = result_of(_start(session, proposal, share_s))
    if is_spoiled(outcome) and session.time_budget.left_s() > 2 * outcome.seconds:
        _tell_again(session, proposal, outcome)
        outcome = _calmer(outcome, result_of(_start(session, proposal, share_s)))
    refuse_killed(session.options.task, outcome)
    _end(session, candidates, proposal, outcome)


def explore(session: Session, candidates: Candidates, doubt: Doubt, anchors: Anchors) -> str:
    """Keep every slot busy until there is a reason to stop; return it, in words.

    Args:
        session: the search.
        candidates: what proposes.
        doubt: of failures.
        anchors: what trials are compared with.

    Raises:
        TrialsLost: what runs trials failed; those that ran meanwhile have ended, and are stored.
    """
    running: dict[Future[Outcome], Proposal] = {}
    spoiled: dict[int, Outcome] = {}
    reason: str | None = None
    failed: TrialsLost | None = None
    while running or reason is None:
        if reason is None:
            reason = _fill(session, candidates, running, anchors)
        for future in ended(running) if running else ():
            proposal = running.pop(future)
            try:
                outcome = result_of(future)
                doubt.take(outcome, proposal.trial.number)
            except TrialsLost as lost:
                reason, failed = str(lost), lost
                continue
            if proposal.number in spoiled:
                outcome = _calmer(spoiled[proposal.number], outcome)
            elif (
                is_spoiled(outcome) and not session.stop.is_set() and (share_s := session.time_budget.trial_share_s(1))
            ):
                _tell_again(session, proposal, outcome)
                spoiled[proposal.number] = outcome
                running[_start(session, proposal, share_s)] = proposal
                continue
            _end(session, candidates, proposal, outcome)
    if failed:
        raise failed
    anchors.look(is_last=True)
    return reason


def _tell_again(session: Session, proposal: Proposal, outcome: Outcome) -> None:
    if isinstance(outcome, Measured):
        what = f"trial {proposal.number}" if proposal.number else "the reference"
        session.warn(f"{what} runs again: other work took {outcome.measurement.disturbed:.0%} of its time.")


def _calmer(one: Outcome, other: Outcome) -> Outcome:
    """The less disturbed of two runs of a trial; the second, where it shows that the configuration cannot be used."""
    if isinstance(one, Measured) and isinstance(other, Measured):
        return min((one, other), key=lambda outcome: outcome.measurement.disturbed)
    return one if other == STOPPED else other


def _fill(
    session: Session, candidates: Candidates, running: dict[Future[Outcome], Proposal], anchors: Anchors
) -> str | None:
    """Start trials in all free slots. Return why no more are to be started, or None."""
    num_trials = session.options.trials
    while len(running) < session.executor.num_slots:
        num_begun = session.study.num_measured + len(running)
        trials_left = num_trials - num_begun
        if session.stop.is_set():
            return INTERRUPTED
        if num_begun >= num_trials:
            return f"all {num_trials} trials were measured"
        share_s = session.time_budget.trial_share_s(-(-trials_left // session.executor.num_slots))
        if share_s is None:
            return TIME_IS_UP
        candidates.take(_next_part(session, candidates, running.values()))
        settled = candidates.settled()
        if not running and anchors.look(is_last=settled is not None):
            settled = candidates.settled()
        if settled is not None:
            return None if running else settled
        proposal = candidates.next(min(trials_left, session.executor.num_slots * session.time_budget.most_trials()))
        if proposal is None:
            return None if running else EXHAUSTED
        running[_start(session, proposal, share_s)] = proposal
    return None


def _next_part(session: Session, candidates: Candidates, running: Collection[Proposal]) -> Part:
    """Of which part the next trial is: of that which has had less time.

    Each has half of the trials, those of the model as it is so that there is a plan whatever becomes of the quality of
    others; what one has no use for is free for all. Load that rises is felt by both. What changes the model goes
    first: the reference is a plan without it, and time may end with any trial.
    """
    if not candidates.has_parts:
        return "all"
    num_trials = session.options.trials
    (same_s, num_same), (changed_s, num_changed) = (_had(session, running, changed) for changed in (False, True))
    is_due = (changed_s, num_changed) <= (same_s, num_same) and num_changed < num_trials // 2
    if 1 + num_same >= -(-num_trials // 2) or not candidates.is_open("same"):
        return "all"
    return "changed" if is_due and session.time_budget.may_judge() and candidates.is_open("changed") else "same"


def _had(session: Session, running: Collection[Proposal], changed: bool) -> tuple[float, int]:
    """Seconds and number of this search's trials of a part, the reference aside; one that runs counts as an average
    one."""
    rows = (row for row in session.study.tried if row.number and not row.known)
    seconds = [row.outcome.seconds for row in rows if row.settings.affect("function") == changed]
    number = len(seconds) + sum(one.settings.affect("function") == changed for one in running)
    return (statistics.fmean(seconds) * number if seconds else 0.0), number


def _start(session: Session, proposal: Proposal, share_s: float) -> Future[Outcome]:
    session.observe(TrialStarted(proposal.number, proposal.settings, promise=proposal.promise))
    name = f"trial-{proposal.number:03d}"
    is_trained = session.options.max_quality_drop is not None and not session.facts.inference
    is_reference = proposal.settings == session.reference_settings and is_trained
    judged = is_reference or (proposal.settings.affect("function") and session.study.judged(proposal.settings) is None)
    judged = judged and not session.judged(proposal.settings)
    request = session.request(name, proposal.settings, share_s, judged=judged)
    if not judged and proposal.number:
        options = request.options.model_copy(update={"to_beat": session.to_beat(proposal.settings)})
        request = request.model_copy(update={"options": options})
    return session.executor.submit(request)


def _end(session: Session, candidates: Candidates, proposal: Proposal, outcome: Outcome) -> None:
    """Store an outcome before anything else is done with it."""
    candidates.finish(proposal)
    if session.was_cut_off(outcome):
        return
    outcome = session.with_quality(proposal.settings, outcome)
    best = session.feasible[:1]
    tried = session.study.finish(proposal.trial, proposal.number, proposal.settings, outcome)
    name = f"trial-{proposal.number:03d}"
    session.learn(name, outcome)
    session.tell_alike(name, proposal.settings, outcome)
    is_best = session.feasible[:1] != best
    is_sure = session.study.paces.of(proposal.number).is_sure
    ended = TrialEnded(proposal.number, proposal.settings, outcome, tried.verdict.feasible, is_best, is_sure=is_sure)
    session.observe(ended)


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


def take_outputs(session: Session) -> None:
    """Of inference whose reference did not fit: its outputs by themselves, for trials to compare theirs with."""
    reference = session.reference
    if not session.facts.inference or reference is None or isinstance(reference.outcome, Measured):
        return
    found = run_once(session, OUTPUTS, lambda: session.requests.outputs_request(OUTPUTS, session.time_budget))
    if not isinstance(found, Measured):
        session.warn("the outputs of the job as it stands are not known: what rounds is not used.")


def _tell_share(session: Session, share: float) -> None:
    """Announce the budget in bytes, once the reference's peak is known.

    Raises:
        UserError: it is below what any process takes.
    """
    session.observe(BudgetKnown(session.budget))
    check_possible(session.budget, session.facts)
    if share > 1:
        session.warn(f"--budget {format_percent(share)} is more memory than the job takes as it stands.")
    if share == 1:
        others = f"other configurations keep a margin of {session.budget.margin:.0%}"
        session.warn(f"--budget 100% admits the job as it stands; {others}.")
