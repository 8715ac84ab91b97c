"""The search's main loop: inspect the task, measure the reference, run trials, measure the best again, write the
plan."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import Interrupted, NothingFits, OutOfTime, PlanError, TaskError, TrialsLost, UserError
from ..files import check_output
from ..plan import Plan, load_plan
from ..search_spaces import SearchSpace, load_space, presets
from ..task import SIGNATURES
from ..task_file import task_file
from ..techniques import Facts, Settings
from ..techniques.batch import Batch
from ..techniques.support.facts import difference
from ..workers import Executor
from ..workers.trial.folder import check_working_folder
from .anchors import Anchors
from .budget import asked, check_possible
from .doubt import Doubt
from .event_base import Event
from .events import INTERRUPTED, QualityKnown, SearchStarted, Stopped, TaskRead, TrialEnded
from .options import Drop, MeasuredBy, SearchOptions
from .own_flags import batch_stays, by_own_flags, may_be_in_tokens, told_early
from .predicted.cuts import find_cuts
from .requests import inspect, inspected, reference_settings
from .sampler.candidates import Candidates
from .sampler.configuration_space import NOT_JUDGED, ConfigurationSpace
from .session import Known, Session, take_others, take_reference
from .store.record import StudyRecord
from .store.storage import check_file, default_storage
from .store.study import PLAN, Study
from .store.tried import Tried
from .store.url import sqlite_files, sqlite_path
from .time_budget import MOST_ROUNDS, TimeBudget
from .trials import TIME_IS_UP, check_reference, explore, explore_whole, measure_first, take_outputs
from .winner.ablation import ablate
from .winner.build_plan import build_plan
from .winner.finalists import settle
from .winner.proof import least_provable


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
        OutOfTime: ``max_time`` left no time to try any.
        Interrupted: ``stop`` was set before anything usable had been measured.
        TrialsLost: what runs trials failed; what was measured is kept.
    """
    try:
        time_budget = time_budget or TimeBudget(options.trial_time, options.max_time)
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
    _check_distills(options)
    space = load_space(options.preset)
    for note in told_early(options, space):
        observe(note)
    found = inspected(options, executor, time_budget, space=space, in_tokens=may_be_in_tokens(options))
    time_budget.read_s = found.seconds
    options, facts = by_own_flags(
        options, found.facts, lambda other: inspect(other, executor, time_budget, in_tokens=True), observe
    )
    found = found.model_copy(update={"facts": facts})
    observe(TaskRead(found.facts, found.seconds))
    _check_evaluates(options, found.facts)
    check_possible(asked(options), found.facts)
    if gone := check_working_folder():
        raise TrialsLost(gone.message)
    study = _open_study(options, space, found.facts)
    try:
        facts = study.record.facts
        session = Session(options, executor, observe, stop, time_budget, study, facts, known)
        session.keep_output("inspect", found)
        try:
            plan, winner = _search(session, space)
        except (Interrupted, NothingFits, OutOfTime):
            session.tell_seconds()
            raise
        _save(plan, options)
        study.keep(PLAN, plan.to_yaml())
        if options.ablate:
            ablate(session, winner)
        session.tell_seconds()
    finally:
        study.close()
    return plan


def _check_evaluates(options: SearchOptions, facts: Facts) -> None:
    """Refuse ``--max-quality-drop`` for a task that does not define ``evaluate``.

    Raises:
        TaskError: the task does not say how good a model is.
    """
    if options.max_quality_drop is not None and not facts.evaluates:
        raise TaskError(
            f"{options.task}: --max-quality-drop {options.max_quality_drop} needs evaluate, which says how good a "
            f"model is. Wanted: {SIGNATURES['evaluate']}."
        )


def _check_distills(options: SearchOptions) -> None:
    """Refuse a distillation that is lost.

    Raises:
        PlanError: recovered weights are not kept.
    """
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
    early = batch_stays(session.options)
    for name, reason in session.facts.left_out.items():
        is_usual = session.facts.inference and session.options.space in presets()  # nobody has asked for it
        if getattr(space, name, None) is not None and reason != early and not is_usual:
            session.warn(f"{name} stays as it is: {reason}.")
    for row in space.unavailable(session.facts):
        session.warn(f"--space: {row.technique} {row.setting.model_dump_json(exclude_defaults=True)}: {row.reason}.")
    reference = reference_settings(session.facts)
    cuts = find_cuts(session, space)
    configurations = ConfigurationSpace(
        cuts.choices,
        reference,
        session.facts.num_blocks,
        precision=session.facts.precision,
        functions=cuts.functions,
    )
    size = configurations.num_configurations
    for reason, number in configurations.conflicts.items():
        if reason == NOT_JUDGED or session.options.space in presets():  # nobody has asked for it
            continue
        session.warn(f"--space: {number:,} combination{'' if number == 1 else 's'} left out: {reason}.")
    num_trials = min(session.options.trials, size)
    session.observe(SearchStarted(session.study.name, size, num_trials, tuple(_earlier(session))))
    candidates = Candidates(session.study, configurations, reference, _start_of(session, configurations))
    if session.reference is None and not session.stop.is_set():
        take_reference(session, candidates)
    if session.reference is None and not session.stop.is_set():
        measure_first(session, candidates, candidates.reference)
    check_reference(session)
    take_outputs(session)
    _tell_provable(session)
    take_others(session, candidates)
    _check_room(session, num_trials)
    doubt, anchors = Doubt(session), Anchors(session)
    stopped = explore_whole(session, candidates, configurations, doubt, anchors)
    session.observe(Stopped(stopped))
    _check_usable(session)
    _check_tried(session, stopped)

    def go_on(row: Tried) -> None:
        """Go on with trials after a finalist was disqualified, since others may now be worth one."""
        nonlocal stopped
        doubt.take(row.outcome)
        candidates.fell(row)  # before it is stored: what a kill leaves out here, a resume finds out again
        session.study.fell(row)
        num_tried, stopped = len(session.study.tried), explore(session, candidates, doubt, anchors)
        if len(session.study.tried) > num_tried:
            session.observe(Stopped(stopped))

    final = settle(session, go_on)
    _check_usable(session)
    plan = build_plan(session, final, INTERRUPTED if session.stop.is_set() else stopped)
    assert final.winner is not None, "there is a plan"
    return plan, final.winner


def _start_of(session: Session, space: ConfigurationSpace) -> tuple[Settings, ...]:
    """The settings to try first, those that the job or the space has not aside.

    Raises:
        PlanError: there is no such plan, or it is another job's.
    """
    path, facts = session.options.start, session.facts
    if path is None:
        return ()
    plan = load_plan(path)
    if plan.task is not None and plan.task.fingerprint != facts.fingerprint:
        said = difference(plan.task.identity, facts.identity)
        raise PlanError(f"--start {path}: the plan is of {plan.task.source}, and this is another job: {said}.")
    if (plan.inference is not None) != facts.inference:
        kinds = ("training", "inference") if facts.inference else ("inference", "training")
        raise PlanError(f"--start {path}: the plan is for {kinds[0]}, and this search for {kinds[1]}.")
    settings = plan.settings.in_force(facts.precision)
    if settings.batch is None:
        settings = settings.having(Batch.reference(facts))
    if (reason := space.conflict(settings)) is not None:
        session.warn(f"--start {path}: it is not tried: {reason}.")
        return ()
    return (settings,)


def _tell_provable(session: Session) -> None:
    """Say what the examples that the reference was judged by can prove, before anything is tried that has to be proven.

    Raises:
        UserError: nothing may be lost, since the quality of which a share may be is 0.
    """
    drop, reference = session.options.max_quality_drop, session.study.reference_quality
    of_inference = session.reference_parity.quality if session.facts.inference and session.reference_parity else None
    value = reference.value if reference is not None else of_inference
    if drop is None or value is None:
        return
    allowed = drop.of(value)
    if drop.is_share and allowed == 0:
        raise UserError(
            f"--max-quality-drop {drop}: the reference's quality is 0, and a share of that is nothing. Give a "
            "number in the units of what evaluate returns, such as 0.5."
        )
    if reference is None:
        session.observe(QualityKnown(value, None, allowed, None, is_proven=False))
        _tell_scatter(session, drop, allowed)
        return
    if reference.noise:
        session.warn(
            f"evaluate draws random numbers: of one model, two evaluations are {reference.noise:.2g} apart, where "
            f"{allowed:.2g} may be lost. That is counted with what seeds make of it; without it more could be proven."
        )
    least = least_provable(reference)
    session.observe(QualityKnown(reference.value, reference.num_examples, allowed, least))
    if least is not None and least > allowed:
        smallest = f"{100 * least / abs(reference.value):.2g} %" if drop.is_share else f"{least:.2g}"
        examples = f"{reference.num_examples:,} examples" if reference.num_examples else "evaluate's standard error"
        session.warn(
            f"--max-quality-drop {drop} can hardly be proven with {examples}: the smallest that {MOST_ROUNDS} pairs "
            f"can prove is about {smallest}. Evaluate on more examples, or allow more."
        )


def _tell_scatter(session: Session, drop: Drop, allowed: float) -> None:
    """Say of inference what makes a drop of this size chance."""
    known = session.reference_parity
    assert known is not None, "it has a quality"
    if (known.quality_noise or 0.0) > allowed:
        session.warn(
            f"evaluate draws random numbers: of one model, two evaluations are {known.quality_noise:.2g} apart, where "
            f"{allowed:.2g} may be lost. Seed what it draws, or allow more."
        )
    if known.quality_error > allowed:
        session.warn(
            f"--max-quality-drop {drop} is {allowed:.2g}, and evaluate's standard error {known.quality_error:.2g}: "
            "other examples may say otherwise. Evaluate on more, or allow more."
        )


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


def _check_room(session: Session, num_trials: int) -> None:
    """Refuse, once it is known what the reference took, a time in which nothing else can be tried.

    Raises:
        OutOfTime: so it is.
    """
    is_over = num_trials > 1 and session.reference is not None and session.time_budget.trial_share_s(1) is None
    if is_over and not session.stop.is_set():
        _check_tried(session, TIME_IS_UP)


def _check_tried(session: Session, stopped: str) -> None:
    """Refuse a plan where nothing but the reference was tried.

    Raises:
        OutOfTime: there was no time for anything but the reference.
    """
    if stopped != TIME_IS_UP or any(row.number != 0 for row in session.study.tried):
        return
    time_budget = session.time_budget
    wanted_s = math.ceil(time_budget.least_s() / 10) * 10
    raise OutOfTime(
        f"--max-time {time_budget.max_time_s:.0f}s left no time to try any configuration beside the job as it stands: "
        f"reading the task and measuring that took {time_budget.elapsed_s():.0f} s, and a part is kept to measure the "
        f"best again. No plan was written. One trial needs about --max-time {wanted_s}s, several need more. --resume "
        "keeps what was measured."
    )


def _earlier(session: Session) -> Iterator[TrialEnded]:
    """The trials of an earlier process, for ``--resume``."""
    best = session.feasible[:1]
    for row in session.study.tried:
        yield TrialEnded(row.number, row.settings, row.outcome, row.verdict.feasible, [row] == best)


def _open_study(options: SearchOptions, space: SearchSpace, facts: Facts) -> Study:
    record = StudyRecord(
        task=options.task,
        command=options.command,
        fingerprint=facts.fingerprint,
        budget=asked(options),
        space=space.model_dump(mode="json", by_alias=True, exclude_none=True),
        facts=facts,
        **options.model_dump(include=set(MeasuredBy.model_fields)),
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
    files: dict[str, Path | None] = {**sqlite_files(options.storage or "")}
    files["the store of measurements"] = sqlite_path(options.measurements or "")
    for name, option in (("the study", "--storage"), ("the store of measurements", "--measurements")):
        if (file := files.get(name)) is not None:
            check_file(file, option)
    check_output(
        path, {"the task": task_file(options.task), "the search space": Path(options.space), **files}, PlanError
    )
