"""The search's main loop: inspect the task, measure the reference, run trials, measure the best again, write the
plan."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

from ..errors import Interrupted, OutOfTime, PlanError, TaskError, TrialsLost
from ..files import check_output
from ..plan import Plan
from ..search_spaces import SearchSpace, load_space
from ..task import SIGNATURES, task_file
from ..techniques import TECHNIQUES, Facts, Technique
from ..workers import STOPPED, Executor, Measured, Outcome, ended, result_of
from ..workers.trial.folder import check_working_folder
from .ablation import ablate
from .budget import asked, check_possible
from .build_plan import build_plan
from .doubt import Doubt
from .events import INTERRUPTED, Event, Inspected, SearchStarted, Stopped, TrialEnded, TrialStarted, Warned
from .finalists import settle
from .known import Known, take_others, take_reference
from .options import SearchOptions
from .own_flags import by_own_flags
from .predictions import foresee
from .reference import check_reference
from .requests import inspected, reference_settings
from .sampler.candidates import Candidates, Proposal
from .sampler.configuration_space import ConfigurationSpace
from .sampler.expected_gain import EXHAUSTED
from .sampler.separable import Separable
from .session import Session
from .store.record import StudyRecord
from .store.storage import check_file, default_storage
from .store.study import Study, Tried
from .store.url import sqlite_files
from .time_budget import LEAST_SHARE_S, TimeBudget

__all__ = ["search"]

_TIME_IS_UP = "the time was used up"
_SPOILED = 0.2
"""A trial that lost this share of its time, or more, to other work runs once more."""


def search(
    options: SearchOptions,
    executor: Executor,
    observe: Callable[[Event], None],
    stop: threading.Event,
    time_budget: TimeBudget | None = None,
    known: Known | None = None,
) -> Plan:
    """Find the fastest configuration that stays within the budget, and save it as a plan.

    Args:
        options: what the user asked for.
        executor: runs the trials; stays the caller's to close.
        observe: is told what happens, in the thread that called.
        stop: once set, running trials are finished and the best so far is written, with ``search.stopped``
            :data:`.events.INTERRUPTED`.
        time_budget: the time that is left, where it runs already; None begins now.
        known: what other searches have measured of the task, which does not count as trials.

    Returns:
        The plan, as it was written to ``options.output``.

    Raises:
        TaskError: the task cannot be loaded, or the job as it stands fails for another reason than memory.
        SpaceError: an unknown technique or value in the space.
        PlanError: the output cannot be written; said before anything runs.
        StudyError: the study is locked, corrupt, or belongs to another task.
        NothingFits: no configuration stays within the budget.
        OutOfTime: ``max_time_s`` left no time to try any.
        Interrupted: ``stop`` was set before anything usable had been measured.
        TrialsLost: what runs trials failed; what was measured is kept.
    """
    try:
        time_budget = time_budget or TimeBudget(options.trial_time_s, options.max_time_s)
        return _run(options, executor, observe, stop, time_budget, known)
    except TrialsLost as lost:
        raise TrialsLost(f"{lost}\nEvery trial that ended is kept: --resume goes on from there.") from None


def _run(
    options: SearchOptions,
    executor: Executor,
    observe: Callable[[Event], None],
    stop: threading.Event,
    time_budget: TimeBudget,
    known: Known | None,
) -> Plan:
    _check_output(options)
    space = load_space(options.preset)
    found = inspected(options, executor, time_budget)
    options, facts, said = by_own_flags(options, found.facts)
    found = found.model_copy(update={"facts": facts})
    observe(Inspected(found.facts))
    if said is not None:
        observe(Warned(said))
    _check_evaluates(options, found.facts)
    check_possible(asked(options), found.facts)
    if gone := check_working_folder():
        raise TrialsLost(gone.message)
    study = _open_study(options, space, found.facts)
    try:
        facts = study.record.facts
        session = Session(options, executor, observe, stop, time_budget, study, facts, known)
        session.keep_output("inspect", found)
        plan, winner = _search(session, space)
        _save(plan, options)
        study.keep_plan(plan)
        if options.ablate:
            ablate(session, winner)
    finally:
        study.close()
    return plan


def _check_evaluates(options: SearchOptions, facts: Facts) -> None:
    """Refuse ``--max-quality-drop`` for a task that does not define ``evaluate``, and a distillation that is lost.

    Raises:
        TaskError: the task does not say how good a model is.
        PlanError: recovered weights are not kept.
    """
    if options.max_quality_drop is not None and not facts.evaluates:
        raise TaskError(
            f"{options.task}: --max-quality-drop {options.max_quality_drop} needs evaluate, which says how good a "
            f"model is. Wanted: {SIGNATURES['evaluate']}."
        )
    if options.distill and not options.keep_weights:
        raise PlanError(
            "--distill: the job that the plan is for has no teacher: what is judged then must be what it trains on "
            "from. Give --keep-weights too, or leave --distill out."
        )


def _save(plan: Plan, options: SearchOptions) -> None:
    """Write the plan, or put it into the error: a full disk must not lose what a search found.

    Raises:
        PlanError: it could not be written; the message holds it.
    """
    try:
        plan.save(options.output)
    except PlanError as error:
        raise PlanError(
            f"{error}\nEverything measured is kept: the same command with --resume and another -o writes the plan and "
            f"measures nothing. It is:\n{plan.to_yaml()}"
        ) from None


def _search(session: Session, space: SearchSpace) -> tuple[Plan, Tried]:
    """The plan, and the trial that it is of."""
    if session.options.resume and not session.study.resumed:
        found = session.study.instead_of
        session.warn(f"--resume: there is no study of this task to go on with: this begins one.{found}")
    for message in session.facts.warnings:
        session.warn(message)
    for name, reason in session.facts.left_out.items():
        if getattr(space, name, None) is not None:
            session.warn(f"{name} is left out: {reason}.")
    for row in space.unavailable(session.facts):
        session.warn(f"--space: {row.technique} {row.setting.model_dump_json(exclude_defaults=True)}: {row.reason}.")
    reference = reference_settings(session.facts)
    configurations = ConfigurationSpace(
        space.choices(session.facts), reference, session.facts.num_blocks, precision=session.facts.precision
    )
    size = configurations.num_configurations
    for reason, number in configurations.conflicts.items():
        session.warn(f"--space: {number:,} combination{'' if number == 1 else 's'} left out: {reason}.")
    num_trials = min(session.options.trials, size)
    session.observe(SearchStarted(session.study.name, size, num_trials, tuple(_earlier(session))))
    candidates = Candidates(session.study, configurations, reference)
    if session.reference is None and not session.stop.is_set():
        take_reference(session, candidates)
    if session.reference is None and not session.stop.is_set():
        _measure(session, candidates, candidates.reference)
    check_reference(session)
    take_others(session, candidates)
    doubt = Doubt(session)
    stopped = _explore_whole(session, candidates, configurations, doubt)
    session.observe(Stopped(stopped))
    _check_usable(session)
    _check_tried(session, stopped)

    def go_on(row: Tried) -> None:
        """Go on with trials after a finalist fell, since others may be worth one now."""
        nonlocal stopped
        doubt.take(row.outcome)
        candidates.fell(row)  # before it is stored: what a kill leaves out here, a resume finds out again
        session.study.fell(row)
        num_tried, stopped = len(session.study.tried), _explore(session, candidates, doubt)
        if len(session.study.tried) > num_tried:
            session.observe(Stopped(stopped))

    final = settle(session, go_on)
    _check_usable(session)
    plan = build_plan(session, final, INTERRUPTED if session.stop.is_set() else stopped)
    assert final.winner is not None, "there is a plan"
    return plan, final.winner


def _check_usable(session: Session) -> None:
    """Refuse to end an interrupted search with a plan of nothing.

    Raises:
        Interrupted: there is nothing.
    """
    if session.stop.is_set() and not session.feasible:
        raise Interrupted(
            f"Interrupted before any usable configuration was measured ({len(session.study.tried)} trials are kept). "
            "Go on with --resume."
        )


def _check_tried(session: Session, stopped: str) -> None:
    """Refuse a plan where nothing but the reference was tried.

    Raises:
        OutOfTime: there was no time for anything but the reference.
    """
    if stopped != _TIME_IS_UP or any(row.number != 0 for row in session.study.tried):
        return
    time_budget = session.time_budget
    wanted_s = math.ceil(time_budget.least_s() / 10) * 10
    raise OutOfTime(
        f"--max-time {time_budget.max_time_s:.0f}s left no time to try any configuration beside the job as it stands: "
        f"reading the task and measuring that took {time_budget.elapsed_s():.0f} s, and a part is kept to measure the "
        f"best again. No plan was written. One trial needs about --max-time {wanted_s}s, several need more. --resume "
        "keeps what was measured."
    )


def _explore_whole(session: Session, candidates: Candidates, space: ConfigurationSpace, doubt: Doubt) -> str:
    """Half of the trials at most with the function as it is, so that there is a plan whatever becomes of the quality of
    others; then with all choices. Returns the reason to stop, in words."""
    stays = {name: TECHNIQUES[name]() for name, row in space.choices.items() if "function" in row[0].affects}
    if stays and session.options.sampler == "gain":
        _choose_sampler(session, candidates, space, stays)
        stopped = _explore(session, candidates, doubt, most=-(-session.options.trials // 2))
        if stopped in (INTERRUPTED, _TIME_IS_UP):
            return stopped
    _choose_sampler(session, candidates, space)
    return _explore(session, candidates, doubt)


def _choose_sampler(
    session: Session, candidates: Candidates, space: ConfigurationSpace, stays: Mapping[str, Technique] | None = None
) -> None:
    name = session.options.sampler
    separable = Separable(session.study, space, session.facts)
    fixed = {**separable.base(session.reference_settings), **(stays or {})} if name == "gain" else {}
    candidates.use(name, foresee(session, space.narrowed(fixed)), fixed, separable.unconfirmed)


def _earlier(session: Session) -> Iterator[TrialEnded]:
    """The trials of an earlier process, for ``--resume``."""
    best = session.feasible[:1]
    for row in session.study.tried:
        yield TrialEnded(row.number, row.settings, row.outcome, row.verdict.feasible, [row] == best)


def _measure(session: Session, candidates: Candidates, propose: Callable[[], Proposal]) -> None:
    """Run one trial to its end, before any other: the reference."""
    share_s = session.time_budget.trial_share_s(session.options.trials) or LEAST_SHARE_S
    proposal = propose()
    outcome = result_of(_start(session, proposal, share_s))
    if _is_spoiled(outcome) and session.time_budget.left_s() > 2 * outcome.seconds:
        outcome = _calmer(outcome, result_of(_start(session, proposal, share_s)))
    _end(session, candidates, proposal, outcome)


def _explore(session: Session, candidates: Candidates, doubt: Doubt, most: int | None = None) -> str:
    """Keep every slot busy until there is a reason to stop; return it, in words.

    Args:
        session: the search.
        candidates: what proposes.
        doubt: of failures.
        most: trials to stop after, those before included; None is what was asked for.

    Raises:
        TrialsLost: what runs trials failed; those that ran meanwhile have ended, and are stored.
    """
    running: dict[Future[Outcome], Proposal] = {}
    spoiled: dict[int, Outcome] = {}
    reason: str | None = None
    failed: TrialsLost | None = None
    while running or reason is None:
        if reason is None:
            reason = _fill(session, candidates, running, most)
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
                _is_spoiled(outcome) and not session.stop.is_set() and (share_s := session.time_budget.trial_share_s(1))
            ):
                spoiled[proposal.number] = outcome
                running[_start(session, proposal, share_s)] = proposal
                continue
            _end(session, candidates, proposal, outcome)
    if failed:
        raise failed
    return reason


def _is_spoiled(outcome: Outcome) -> bool:
    """Whether other work, or a pause of the machine, took too much of a trial's time for its speed to count."""
    return isinstance(outcome, Measured) and outcome.measurement.disturbed >= _SPOILED


def _calmer(one: Outcome, other: Outcome) -> Outcome:
    """The less disturbed of two runs of a trial; the second, where it shows that the configuration cannot be used."""
    if isinstance(one, Measured) and isinstance(other, Measured):
        return min((one, other), key=lambda outcome: outcome.measurement.disturbed)
    return one if other == STOPPED else other


def _fill(
    session: Session, candidates: Candidates, running: dict[Future[Outcome], Proposal], most: int | None
) -> str | None:
    """Start trials in all free slots. Return why no more are to be started, or None."""
    num_trials = session.options.trials
    while len(running) < session.executor.num_slots:
        num_begun = session.study.num_measured + len(running)
        trials_left = num_trials - num_begun
        if session.stop.is_set():
            return INTERRUPTED
        if num_begun >= (most or num_trials):
            return f"all {num_trials} trials were measured"
        share_s = session.time_budget.trial_share_s(-(-trials_left // session.executor.num_slots))
        if share_s is None:
            return _TIME_IS_UP
        settled = candidates.settled()
        if settled is not None:
            return None if running else settled
        proposal = candidates.next(min(trials_left, session.executor.num_slots * session.time_budget.most_trials()))
        if proposal is None:
            return None if running else EXHAUSTED
        running[_start(session, proposal, share_s)] = proposal
    return None


def _start(session: Session, proposal: Proposal, share_s: float) -> Future[Outcome]:
    session.observe(TrialStarted(proposal.number, proposal.settings, promise=proposal.promise))
    name = f"trial-{proposal.number:03d}"
    is_reference = proposal.settings == session.reference_settings and session.options.max_quality_drop is not None
    judged = is_reference or (proposal.settings.affect("function") and session.study.judged(proposal.settings) is None)
    return session.executor.submit(session.request(name, proposal.settings, share_s, judged=judged))


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
        command=options.command,
        fingerprint=facts.fingerprint,
        budget=asked(options),
        seed=options.seed,
        effective_batch=options.effective_batch,
        allow_split=options.allow_split,
        max_quality_drop=options.max_quality_drop,
        recovery_steps=options.recovery_steps if options.max_quality_drop is not None else 0,
        recovery_lr=options.recovery_lr if options.max_quality_drop is not None else 1.0,
        distill=options.distill and options.max_quality_drop is not None,
        space=space.model_dump(mode="json", by_alias=True, exclude_none=True),
        facts=facts,
    )
    stem = options.stem
    url = options.storage or default_storage(stem)
    begin = Study.resume if options.resume else Study.create
    return begin(url, stem, record)


def _check_output(options: SearchOptions) -> None:
    """Refuse, before the search, an output that cannot be written or would replace something else.

    Raises:
        PlanError: so it is.
        StudyError: the storage is none.
    """
    path = options.output
    files = sqlite_files(options.storage) if options.storage else {}
    if files:
        check_file(files["the study"])
    check_output(
        path, {"the task": task_file(options.task), "the search space": Path(options.space), **files}, PlanError
    )
