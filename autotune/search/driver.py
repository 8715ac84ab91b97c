"""The search: inspect, measure the reference, ask and tell until told to stop, settle the finalists, write the plan."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from ..errors import Interrupted, PlanError, TaskError, TrialsLost
from ..files import FOLDER, check_output
from ..plan import Budget, Plan
from ..search_spaces import SearchSpace, load_space
from ..task import task_file
from ..techniques import Facts
from ..workers import Executor, Measured, Outcome, OutOfMemory, TimedOut, ended, result_of
from .apart import Apart
from .candidates import Candidates, ConfigurationSpace, Proposal
from .conclude import conclude
from .doubt import Doubt
from .events import Event, Inspected, SearchStarted, Stopped, TrialEnded, TrialStarted
from .expected_gain import EXHAUSTED
from .finalists import settle
from .foresight import foresee
from .inquiry import Inquiry, failure, inspect, reference_settings
from .options import SearchOptions
from .pace import LEAST_SHARE_S, Pace
from .record import StudyRecord
from .session import Session
from .storage import default_storage, sqlite_path
from .study import Study, Tried

__all__ = ["INTERRUPTED", "search"]

INTERRUPTED = "interrupted"
"""``Plan.search.stopped`` after the user's Ctrl-C."""


def search(
    options: SearchOptions,
    executor: Executor,
    observe: Callable[[Event], None],
    stop: threading.Event,
    pace: Pace | None = None,
) -> Plan:
    """Find the fastest configuration that stays within the budget, and save it as a plan.

    Args:
        options: what the user asked for.
        executor: runs the trials; stays the caller's to close.
        observe: is told what happens, in the thread that called.
        stop: once set, running trials are finished and the best so far is written, with ``search.stopped``
            :data:`INTERRUPTED`.
        pace: the time that is left, where it runs already; None begins now.

    Returns:
        The plan, as it was written to ``options.output``.

    Raises:
        TaskError: the task cannot be loaded, or the job as it stands fails for another reason than memory.
        SpaceError: an unknown technique or value in the space.
        PlanError: the output cannot be written; said before anything runs.
        StudyError: the study is locked, corrupt, or belongs to another task.
        NothingFits: no configuration stays within the budget.
        Interrupted: ``stop`` was set before anything usable had been measured.
        TrialsLost: what runs trials failed; what was measured is kept.
    """
    try:
        return _run(options, executor, observe, stop, pace or Pace(options.trial_time_s, options.max_time_s))
    except TrialsLost as lost:
        raise TrialsLost(f"{lost}\nEvery trial that ended is kept: --resume goes on from there.") from None


def _run(
    options: SearchOptions, executor: Executor, observe: Callable[[Event], None], stop: threading.Event, pace: Pace
) -> Plan:
    _check_output(options)
    space = load_space(options.space)
    facts = inspect(options, executor, pace)
    observe(Inspected(facts))
    study = _open_study(options, space, facts)
    try:
        facts = study.record.facts
        task = os.path.abspath(options.task)  # while there is a current folder
        inquiry = Inquiry(task, options.seed, study.record.budget, facts)
        session = Session(options, executor, observe, stop, pace, study, facts, inquiry)
        plan = _search(session, space)
    finally:
        study.close()
    plan.save(options.output)
    return plan


def _search(session: Session, space: SearchSpace) -> Plan:
    if session.options.resume and not session.study.resumed:
        session.warn("--resume: there is no study of this task to go on with: this begins one.")
    for message in session.facts.warnings:
        session.warn(message)
    for row in space.unavailable(session.facts):
        session.warn(f"--space: {row.technique} {row.setting.model_dump_json(exclude_defaults=True)}: {row.reason}.")
    reference = reference_settings(session.facts)
    configurations = ConfigurationSpace(space.choices(session.facts), reference, session.facts.num_blocks)
    size = configurations.num_configurations
    num_trials = min(session.options.trials, size)
    session.observe(SearchStarted(session.study.name, size, num_trials, tuple(_earlier(session))))
    candidates = Candidates(session.study, configurations, reference)
    if session.reference is None and not session.stop.is_set():
        _measure(session, candidates, candidates.reference)
    _check_reference(session)
    _choose_sampler(session, candidates, configurations)
    doubt = Doubt(session)
    stopped = _explore(session, candidates, doubt)
    session.observe(Stopped(stopped))
    _check_usable(session)

    def go_on(row: Tried) -> None:
        """Now that this one fell, something else may be worth a trial."""
        nonlocal stopped
        doubt.take(row.outcome)
        candidates.fell(row)  # before it is stored: what a kill leaves out here, a resume finds out again
        session.study.fell(row)
        num_tried, stopped = len(session.study.tried), _explore(session, candidates, doubt)
        if len(session.study.tried) > num_tried:
            session.observe(Stopped(stopped))

    final = settle(session, go_on)
    _check_usable(session)
    return conclude(session, final, INTERRUPTED if session.stop.is_set() else stopped)


def _check_usable(session: Session) -> None:
    """A search that was interrupted needs something to make a plan of.

    Raises:
        Interrupted: there is nothing.
    """
    if session.stop.is_set() and not session.feasible:
        raise Interrupted(
            f"Interrupted before any usable configuration was measured ({len(session.study.tried)} trials are kept). "
            "Go on with --resume."
        )


def _choose_sampler(session: Session, candidates: Candidates, space: ConfigurationSpace) -> None:
    name = session.options.sampler
    apart = Apart(session.study, space, session.facts)
    fixed = apart.base(session.reference_settings) if name == "law" else {}
    candidates.use(name, foresee(session, space.narrowed(fixed)), fixed, apart.unconfirmed)


def _earlier(session: Session) -> Iterator[TrialEnded]:
    """What an earlier driver measured."""
    best = session.feasible[:1]
    for row in session.study.tried:
        yield TrialEnded(row.number, row.settings, row.outcome, row.verdict.feasible, [row] == best)


def _measure(session: Session, candidates: Candidates, propose: Callable[[], Proposal]) -> None:
    """Run one trial to its end: the reference."""
    share_s = session.pace.trial_share_s(session.options.trials) or LEAST_SHARE_S
    proposal = propose()
    _end(session, candidates, proposal, result_of(_start(session, proposal, share_s)))


def _check_reference(session: Session) -> None:
    """The job as it stands must run, but for its memory.

    Raises:
        TaskError: it fails, or gains memory each step.
    """
    reference = session.reference
    if reference is None:
        return
    outcome, task = reference.outcome, session.options.task
    if isinstance(outcome, Measured):
        if outcome.measurement.leak_bytes_per_step is not None:
            raise TaskError(
                f"{task}: the job as it stands {reference.verdict.reason}, so that no configuration can be measured. "
                "A list that keeps each step's loss with its graph is the usual cause: keep loss.item()."
            )
        if reference.verdict.over_memory:
            session.warn(f"the reference is {reference.verdict.reason}; it was measured without enforcement.")
    elif isinstance(outcome, OutOfMemory):
        session.warn(f"the reference does not fit the device ({reference.verdict.reason}): there is no gain to state.")
    elif isinstance(outcome, TimedOut) and session.options.max_time_s is not None:
        raise TaskError(
            f"{task}: the job as it stands did not end within the {outcome.deadline_s:.0f} s that --max-time leaves "
            f"for it. Give it more time, unless it hangs: it was {outcome.message.removeprefix('ended while ')}"
        )
    else:
        raise TaskError(f"{task}: the job as it stands fails: {failure(outcome)}")


def _explore(session: Session, candidates: Candidates, doubt: Doubt) -> str:
    """Keep every slot busy until there is a reason to stop; returns it, in words.

    Raises:
        TrialsLost: what runs trials failed; those that ran meanwhile have ended, and are stored.
    """
    running: dict[Future[Outcome], Proposal] = {}
    reason: str | None = None
    failed: TrialsLost | None = None
    while running or reason is None:
        if reason is None:
            reason = _fill(session, candidates, running)
        for future in ended(running) if running else ():
            proposal = running.pop(future)
            try:
                outcome = result_of(future)
                doubt.take(outcome, proposal.trial.number)
            except TrialsLost as lost:
                reason, failed = str(lost), lost
            else:
                _end(session, candidates, proposal, outcome)
    if failed:
        raise failed
    return reason


def _fill(session: Session, candidates: Candidates, running: dict[Future[Outcome], Proposal]) -> str | None:
    """Start trials in free slots; the reason to start no more, or None."""
    num_trials = session.options.trials
    while len(running) < session.executor.num_slots:
        trials_left = num_trials - len(session.study.tried) - len(running)
        if session.stop.is_set():
            return INTERRUPTED
        if trials_left <= 0:
            return f"all {num_trials} trials were measured"
        share_s = session.pace.trial_share_s(-(-trials_left // session.executor.num_slots))
        if share_s is None:
            return "the time was used up"
        settled = candidates.settled()
        if settled is not None:
            return None if running else settled
        proposal = candidates.next(min(trials_left, session.executor.num_slots * session.pace.most_trials()))
        if proposal is None:
            return None if running else EXHAUSTED
        running[_start(session, proposal, share_s)] = proposal
    return None


def _start(session: Session, proposal: Proposal, share_s: float) -> Future[Outcome]:
    session.observe(TrialStarted(proposal.number, proposal.settings))
    name = f"trial-{proposal.number:03d}"
    return session.executor.submit(session.request(name, proposal.settings, share_s))


def _end(session: Session, candidates: Candidates, proposal: Proposal, outcome: Outcome) -> None:
    """Store an outcome before anything else is done with it."""
    candidates.finish(proposal)
    if session.was_cut_off(outcome):
        return
    best = session.feasible[:1]
    tried = session.study.finish(proposal.trial, proposal.number, proposal.settings, outcome)
    session.learn(f"trial-{proposal.number:03d}", outcome)
    is_best = session.feasible[:1] != best
    session.observe(TrialEnded(proposal.number, proposal.settings, outcome, tried.verdict.feasible, is_best))


def _open_study(options: SearchOptions, space: SearchSpace, facts: Facts) -> Study:
    record = StudyRecord(
        task=options.task,
        fingerprint=facts.fingerprint,
        budget=Budget(limit=options.budget_bytes, device=options.device, margin=options.margin),
        seed=options.seed,
        effective_batch=options.effective_batch,
        allow_split=options.allow_split,
        space=space.model_dump(mode="json", by_alias=True, exclude_none=True),
        facts=facts,
    )
    stem = Path(options.task).stem
    url = options.storage or default_storage(stem)
    begin = Study.resume if options.resume else Study.create
    return begin(url, stem, record)


def _check_output(options: SearchOptions) -> None:
    """Find out before the search that its result cannot be written, or would take the place of something else.

    Raises:
        PlanError: so it is.
    """
    path = options.output
    study = sqlite_path(options.storage) if options.storage else None
    taken = {"the task": task_file(options.task), "the search space": Path(options.space), "the study": study}
    if path.resolve().is_relative_to(FOLDER.resolve()):
        raise PlanError(f"{path}: {FOLDER} holds the studies. Choose another path with -o.")
    check_output(path, taken, PlanError)
