"""``autotune verify``: measure a plan again where it is to be used, and hold it against what it states."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..errors import PlanError, TaskError, UserError
from ..measure import Measurement, Parity
from ..plan import Budget, Evidence, Inference, Plan, load_plan
from ..report.printing import print_json, print_words, tell
from ..report.verification import as_json, explain
from ..results import Verification
from ..script.changes import Changes
from ..script.command import own_share, script_name
from ..script.distributed_launch import other_than_asked
from ..script.flags import fill
from ..script.scratch import Scratch
from ..searches.options import ANY_DROP, Drop, HowToSearch, SearchOptions
from ..searches.requests import Requests, check_plan, failure, inspect
from ..searches.time_budget import NUM_REPEATS, TimeBudget
from ..searches.verdict import latency_words, over_words
from ..searches.winner.build_plan import environment_of
from ..searches.winner.evaluation import evaluation_of
from ..searches.winner.evidence import combine
from ..task_file import split_source
from ..techniques import Facts
from ..training.drift import differences
from ..units import ceil_mib, format_bytes
from ..words import facts_words, outcome_words, settings_words
from ..workers import Crashed, Executor, Failed, Measured, Outcome, OutOfMemory, TimedOut
from .where import Where, default_device, trials


def verify(path: Path, job: Sequence[str] | None, where: Where, asked: HowToSearch, json: bool) -> Verification:
    """Measure a plan again and print what was found.

    Args:
        path: the plan.
        job: a task file, or what starts a script; None is the plan's own task, next to the plan.
        where: what runs it.
        asked: ``trial_time`` of each repeat, and ``scratch`` of a script.
        json: print one JSON document.
    """
    if asked.given(["scratch"]) and not where.is_script:
        raise UserError("--scratch is for a script's trials. Give the command that starts it, behind --.")
    plan = load_plan(path)
    if plan.budget.device is None:
        plan = plan.on(default_device(where.address))
    task, command, notes = job_of(plan, job, path)
    for note in notes:
        tell(note)
    tell(f"runs {task} with {path}")

    assert plan.budget.device is not None, "set above"
    with trials(where.for_plan(plan, command), task, plan.budget.device) as executor:
        changes = Changes(Path.cwd(), path) if command else None
        found = verify_plan(plan, task, executor, tell, asked.trial_time, command, asked.scratch)
    if changes is not None and (said := changes.told()):
        tell(said)
    if json:
        print_json({"path": str(path), "task": task, **as_json(found, plan)})
    else:
        print_words(sys.stdout, explain(found, plan))
    return found


def job_of(
    plan: Plan, job: Sequence[str] | None, path: Path | None, command: str = "verify"
) -> tuple[str, tuple[str, ...] | None, tuple[str, ...]]:
    """What a plan is verified with: the task, the script's command with the plan's batch in it, and what to say of it.

    Args:
        plan: the plan.
        job: a task file, or what starts a script; None is the plan's own task.
        path: the plan's, beside which its own task is.
        command: of autotune, that asks.

    Raises:
        UserError: there is no such task.
    """
    if not job:
        return _beside(path or Path("plan.yaml"), plan, command), None, ()
    if len(job) == 1:
        return job[0], None, ()
    evaluation = plan.evaluation_batch
    started, changed = fill(job, own_share(plan.settings), evaluation)
    notes = (changed, other_than_asked(started))
    return script_name(started), tuple(started), tuple(note for note in notes if note is not None)


def _beside(path: Path, plan: Plan, command: str) -> str:
    """The plan's own task: below the plan's folder as it is named, or next to the plan. A plan runs no other file.

    Raises:
        UserError: there is none.
    """
    if plan.task is None:
        raise UserError(f"{path}: it names no task. Give it: `autotune {command} {path} model.py`.")
    folder, source = path.parent, plan.task.source
    for candidate in (str(folder / source), str(folder / Path(source).name)):
        try:
            file, _ = split_source(candidate)
        except TaskError:
            continue
        if file.resolve().is_relative_to(folder.resolve()):
            return candidate
    raise UserError(
        f"{path}: its task {source} is not next to it. Give it: `autotune {command} {path} path/to/model.py`."
    )


def verify_plan(
    plan: Plan,
    task: str,
    executor: Executor,
    say: Callable[[str], None],
    trial_time_s: float = 60.0,
    command: Sequence[str] | None = None,
    scratch: Scratch = "auto",
) -> Verification:
    """Measure a plan in three fresh interpreters.

    Args:
        plan: with its device, the budget to hold and, where a search wrote it, the evidence to compare with.
        task: ``model.py`` or ``model.py:name``, or the name of a script.
        executor: runs it; stays the caller's to close.
        say: is told what happens, in words.
        trial_time_s: the time share of each repeat's timed windows, seconds.
        command: what starts the script, with the plan's batch in its flags.
        scratch: the folder that the script's trials run in.

    Raises:
        PlanError: the plan was found for another model, or asks for what cannot be had here.
        TaskError: the task cannot be loaded, or fails for another reason than memory.
    """
    device = plan.budget.device
    assert device is not None, "the caller says where"
    seed = plan.search.seed if plan.search else 0
    allowed = plan.inference.max_drop if plan.inference is not None else None
    drop = Drop(allowed, is_share=False) if allowed is not None else None
    time_budget, started = TimeBudget(trial_time_s, None), tuple(command) if command else None
    options = SearchOptions(
        task=task,
        command=started,
        scratch=scratch,
        device=device,
        seed=seed,
        allow_split=True,
        max_quality_drop=ANY_DROP if plan.inference is None else drop,
        inference=plan.inference is not None,
    )
    batch = plan.settings.batch
    in_tokens = batch is not None and batch.flag is not None
    facts = inspect(options, executor, time_budget, in_tokens=in_tokens)
    say(f"task: {facts_words(facts)}")
    say(f"settings: {settings_words(plan.settings, facts)}")
    warnings = tuple(_differences(plan, facts))
    checked = check_plan(plan, task, facts)
    facts = checked if plan.inference is None else facts  # of inference, as many outputs are compared as in a search
    for message in warnings:
        say(f"note: {message}")
    life = True if plan.measured is not None and "resuming" in plan.measured.peak.phases else None
    tolerance = (plan.inference.tolerance if plan.inference is not None else None) or 0.0
    requests = Requests(task, seed, plan.budget, facts, started, scratch, life=life, tolerance=tolerance, drop=drop)
    reference = _reference(requests, executor, time_budget, say) if plan.inference is not None else None
    repeats: list[Measurement] = []
    for number in range(1, NUM_REPEATS + 1):
        say(f"run {number} starts, in a fresh interpreter")
        measure = requests.measure_options(plan.settings, trial_time_s, reference)
        deadline_s = time_budget.deadline_s(trial_time_s, spare_finalists=False)
        request = requests.request(f"verify-{number}", plan.settings, measure, deadline_s)
        known = {"evaluation": plan.evaluation, "measured": plan.measured}  # without one, the task's own batch
        as_job = request.plan.model_copy(update=known)
        outcome = executor.ask(request.model_copy(update={"fresh": True, "plan": as_job}))
        say(f"run {number} of {NUM_REPEATS}: {outcome_words(outcome, plan.budget)}")
        if isinstance(outcome, OutOfMemory):
            at = format_bytes(ceil_mib(outcome.peak_bytes))
            return Verification(None, f"out of memory at {at}: {outcome.message}", None, warnings)
        found = _measurement(outcome, task)
        if found.leak_bytes_per_step is not None:
            leak = format_bytes(ceil_mib(round(found.leak_bytes_per_step)))
            return Verification(None, f"leaks about {leak} each step: it outgrows any budget", None, warnings)
        if found.parity.compared in ("outputs", "quality") and found.parity.unlike is not None:
            return Verification(None, found.parity.unlike, None, warnings)
        repeats.append(found)
        time_budget.learn(outcome, fresh=True)
    measured = combine(repeats, plan.budget)
    over, slower = _over(plan.budget, measured), _slower(plan, measured)
    by_rank = tuple(map(max, zip(*(one.bytes_by_rank for one in repeats), strict=True)))
    deviation = None if reference is None else max(one.parity.deviation for one in repeats)
    inferred = None if reference is None or plan.inference is None else _judged(plan.inference, reference, repeats)
    return Verification(measured, over, slower, warnings, evaluation_of(repeats), by_rank, deviation, inferred)


def _judged(stated: Inference, reference: Parity, repeats: Sequence[Measurement]) -> Inference | None:
    """The lowest quality of the repeats, and the reference's; None where outputs are held to a tolerance."""
    found = [one.parity.quality for one in repeats if one.parity.quality is not None]
    if not found:
        return None
    return stated.model_copy(
        update={
            "deviation": max(one.parity.deviation for one in repeats),
            "quality": min(found),
            "reference_quality": reference.quality,
        }
    )


def _reference(requests: Requests, executor: Executor, time_budget: TimeBudget, say: Callable[[str], None]) -> Parity:
    """The outputs of the job as it stands, which the plan's are compared with.

    Raises:
        TaskError: it fails.
    """
    say("the job as it stands runs once, for its outputs")
    outcome = executor.ask(requests.outputs_request("verify-reference", time_budget))
    if isinstance(outcome, OutOfMemory | TimedOut | Crashed):
        raise TaskError(f"{requests.task}: the job as it stands gives no outputs to compare with: {failure(outcome)}")
    return _measurement(outcome, requests.task).parity


def _differences(plan: Plan, facts: Facts) -> Iterator[str]:
    batch = plan.settings.batch
    if (
        batch is not None
        and batch.flag is None
        and facts.effective_batch_held
        and batch.num_samples != facts.effective_batch
    ):
        yield (
            f"an optimizer step of the plan sees {batch.num_samples} samples, and the task's batch size is "
            f"{facts.effective_batch}"
        )
    found = differences(plan, environment_of(facts))
    yield from (one.what for one in found)


def _measurement(outcome: Outcome, task: str) -> Measurement:
    if isinstance(outcome, Measured):
        return outcome.measurement
    if isinstance(outcome, Failed) and not outcome.traceback:
        raise PlanError(outcome.message)
    raise TaskError(f"{task}: the plan cannot be measured: {failure(outcome)}")


def _over(budget: Budget, measured: Evidence) -> str | None:
    if measured.latency is not None and measured.latency.exceeds(budget):
        return latency_words(measured.latency, budget)
    over = None if measured.fits else budget.over(measured.peak)
    return None if over is None else over_words(over)


def _slower(plan: Plan, measured: Evidence) -> str | None:
    """Slower is what lies below the plan's own interval, its own included."""
    if plan.measured is None:
        return None
    stated, now = plan.measured.samples_per_s, measured.samples_per_s
    if now.high >= stated.low:
        return None
    return f"{now.value:.5g} samples/s, {1 - now.value / stated.value:.1%} below the plan's {stated.value:.5g}"
