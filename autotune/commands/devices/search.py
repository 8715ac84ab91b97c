"""``autotune search --devices``: one training over unlike devices, with a plan and a share for each type of them."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...batch.jobs import Job, Jobs, check_task
from ...batch.lane import Inspecting, Shares
from ...batch.run import Batch, JobRun, job_run
from ...bundle import BUNDLE, Bundle
from ...errors import AutotuneError, Interrupted, NothingFits, PlanError, UserError
from ...plan import Plan
from ...report.batch import explain_sharing
from ...report.printing import listened_to, print_json, print_words, tell
from ...results import PreviewedJob
from ...search_spaces import load_space
from ...searches.budget import asked, check_possible
from ...searches.options import SearchOptions
from ...searches.requests import inspect
from ...searches.reuse import code_of, key_of
from ...searches.time_budget import TimeBudget
from ...searches.winner.unlike import Share, SharedTraining, check_apart, check_ranks, check_shareable
from ...task_file import task_file
from ...techniques import Facts
from ...techniques.parallel import Parallel
from ...words import count
from ..batch import (
    Devices,
    WhatToTune,
    as_document,
    close_all,
    executors_for,
    preview_as_json,
    preview_jobs,
    run_jobs,
    tell_of,
)
from ..interrupts import interrupts
from ..search import kept_measurements
from ..verify import verify_plan
from ..where import Where
from .types import ONCE, UnlikeType, every_type, split_devices

if TYPE_CHECKING:
    from ...workers import Executor

SEARCHES = "searches"
"""The folder, in the bundle's, of the searches' own plans, studies and summary."""
_NOT_TAKEN = (
    "flags",
    "scratch",
    "max_quality_drop",
    "recovery_steps",
    "recovery_lr",
    "distill",
    "keep_weights",
    "storage",
    "ablate",
    "require_proof",
    "progress",
)
"""Options that only a search on one type of device has."""


def search_devices(options: SearchOptions, text: str, where: Where, dry_run: bool, json: bool) -> int:
    """Search on each type of device, share the training out, and write the bundle; or say what would be done.

    Args:
        options: of each search; ``output`` is the bundle's folder.
        text: ``--devices``.
        where: what runs the trials.
        dry_run: measure nothing.
        json: print one JSON document.

    Returns:
        The exit code: 0 with a bundle, 130 after a Ctrl-C, else that of a search without a plan.
    """
    _check_options(options)
    types = split_devices(text) or every_type(text, options.task, where)
    with executors_for(_jobs(types, options), task_file(options.task), where) as executors:
        return search_types(options, types, executors, dry_run, json)


def search_types(
    options: SearchOptions, types: Sequence[UnlikeType], executors: Devices, dry_run: bool, json: bool
) -> int:
    """As :func:`search_devices`, where the types are known.

    Args:
        options: of each search; ``output`` is the bundle's folder.
        types: of devices.
        executors: by device; the caller closes them.
        dry_run: measure nothing.
        json: print one JSON document.
    """
    executors = {device: Inspecting(executor, {}) for device, executor in executors.items()}
    ranks, jobs, results = _ranks(types, executors), _jobs(types, options), kept_measurements(options)
    what = WhatToTune(task_file(options.task), options.output / SEARCHES, resume=options.resume)
    tell("reading the task on each type of device")
    runs = [job_run(job, what.folder, "", what.resume) for job in jobs.jobs]
    known = {run.where: _facts(run, executors[run.where]) for run in runs}
    _check_facts([*known.values()], options, sum(ranks.values()))
    if dry_run:
        effective = known[runs[0].where].effective_batch
        return _preview(preview_jobs(jobs, what, executors, results), ranks, effective, json)
    found, stop = run_jobs(jobs, what, executors, results)
    code = tell_of(found, stop.is_set())
    document: dict[str, Any] = {"path": None, **as_document(found)}
    if any(run.plan is None for run in found.jobs):
        tell(_no_bundle(found, options.output))
    else:
        kept = {}
        for run in found.jobs:
            key = key_of(known[run.where], run.options, code_of(run.options))
            kept[run.where] = Shares(executors[run.where], results, key, f"{found.name}/shares", options.resume)
        bundle = _share_out(found, ranks, options, kept, stop)
        code = Interrupted.exit_code if stop.is_set() else code
        document |= {"path": str(options.output), "bundle": bundle.model_dump(mode="json", by_alias=True)}
    if json:
        print_json({"exit_code": code, **document})
    elif document["path"] is not None:
        with listened_to(sys.stdout):
            print(options.output)
    return code


def _check_options(options: SearchOptions) -> None:
    """Refuse what cannot be had over unlike devices, before anything starts.

    Raises:
        UserError: so it is, or there is no such task or space.
    """
    if options.command is not None:
        raise UserError("--devices is for a task file: a script's gradients are its own to weight. Write a task file.")
    if given := options.given(_NOT_TAKEN):
        raise UserError(f"--devices cannot be had with {', '.join(given)}. Leave that out, or give --device.")
    if options.output.exists() and not options.output.is_dir():
        raise UserError(f"{options.output}: a folder was expected for the bundle, but it is none. Choose another, -o.")
    check_task(options.task)
    load_space(options.space)


def _jobs(types: Sequence[UnlikeType], options: SearchOptions) -> Jobs:
    """The search on each type."""
    jobs = [
        Job(name=one.name, task=options.task, device=one.device, **{**options.asked(), **one.asked()}) for one in types
    ]
    return Jobs(jobs=tuple(jobs))


def _ranks(types: Sequence[UnlikeType], executors: Devices) -> dict[str, int]:
    """How many there are on each type, by device.

    Raises:
        UserError: two names mean one type.
    """
    meant: dict[str, str] = {}
    for one in types:
        type_ = executors[one.device].device_type
        if (other := meant.setdefault(type_, one.device)) != one.device:
            raise UserError(f"--devices: {other} and {one.device} mean one type, {type_}. {ONCE}")
    return {one.device: one.ranks or executors[one.device].num_slots for one in types}


def _facts(run: JobRun, executor: Executor) -> Facts:
    """What is known of the task on a type of device.

    Raises:
        UserError: it cannot be read there, or the budget is below what any process takes.
        NothingFits: the device does not hold the model with one sample.
    """
    options = run.options
    try:
        facts = inspect(options, executor, TimeBudget(options.trial_time, options.max_time))
        check_possible(asked(options), facts)
    except (UserError, NothingFits) as error:
        raise type(error)(f"{run.where}: {error}") from None
    return facts


def _check_facts(known: Sequence[Facts], options: SearchOptions, num_ranks: int) -> None:
    """Refuse what cannot be shared out, before anything is measured.

    Raises:
        UserError: so it is.
    """
    for facts in known:
        if not facts.effective_batch_held:
            raise UserError(f"{options.task}: states no batch_size for ranks to share. Give --effective-batch.")
        check_ranks(num_ranks, facts.effective_batch)
        check_shareable(facts, options.task, options.allow_split)
    check_apart(known)


def _preview(found: Sequence[PreviewedJob], ranks: Mapping[str, int], effective: int, json: bool) -> int:
    """Say what would be done; the exit code."""
    if json:
        document = {"effective": effective, "ranks": ranks, "jobs": [preview_as_json(one) for one in found]}
        print_json(document)
    else:
        print_words(sys.stdout, explain_sharing(found, ranks, effective), 140)
    return 0 if all(one.preview is not None for one in found) else UserError.exit_code


def _no_bundle(found: Batch, folder: Path) -> str:
    """Why there is none, and what to do."""
    missing = [run for run in found.jobs if run.plan is None]
    names = ", ".join(run.where for run in missing)
    words = [
        f"No bundle was written: it takes a plan for each type, and there is none for {names}. What was measured is "
        "kept."
    ]
    if small := [run.where for run in missing if run.state == "nothing fits"]:
        words.append(
            f"Name a larger budget behind the type, {small[0]}=SIZE, and --resume: what was measured serves again."
        )
    if any(run.state == "interrupted" for run in missing):
        words.append("--resume goes on.")
    if (folder / BUNDLE).exists():
        words.append(f"{folder / BUNDLE} is of an earlier search.")
    return " ".join(words)


def _share_out(
    found: Batch,
    ranks: Mapping[str, int],
    options: SearchOptions,
    executors: Mapping[str, Shares],
    stop: threading.Event,
) -> Bundle:
    """Write the bundle: by what shares take or, if ``stop`` is set before each type has one, by the searches' trials.

    Raises:
        UserError: the batch cannot be shared out, or a share cannot be measured.
        NothingFits: a share is over the budget.
    """
    studies = [(str(run.options.storage), ranks[run.where]) for run in found.jobs]
    training = SharedTraining.read(studies, options.effective_batch, options.allow_split)

    def measure(number: int, plan: Plan, samples: int) -> float:
        run, batch = found.jobs[number], plan.settings.batch
        assert batch is not None, "it states the share"
        executor = executors[run.where]
        num_before = executor.num_measured
        try:
            took_s = _seconds(plan, executor, options)
        except AutotuneError as error:
            if stop.is_set():
                raise Interrupted(str(error)) from None
            raise
        took = "over the budget" if math.isinf(took_s) else f"in {took_s:.4g} s"
        known = ", known" if executor.num_measured == num_before else ""
        tell(f"{run.job.name}: {samples} of {training.effective} samples {took} ({batch.describe()}{known})")
        return took_s

    shares = None
    with interrupts(stop, lambda: close_all(executors)), suppress(Interrupted):
        if not stop.is_set():
            tell("measuring shares of the batch")
            shares = training.even_out(measure)
    if stop.is_set():
        by = "the searches' trials" if shares is None else "the shares that were measured"
        tell(f"Interrupted: the shares go by {by}. --resume measures the rest.")
    shares = shares or training.expected()
    bundle = save(training, shares, options.output)
    tell("\n".join(bundle_lines(bundle, shares, options.output)))
    return bundle


def _seconds(plan: Plan, executor: Executor, options: SearchOptions) -> float:
    """What a share takes one process alone, in fresh interpreters; infinite where it is over the budget."""
    assert plan.settings.batch is not None, "it states the share"
    alone = plan.settings.having(Parallel())
    as_plan = plan.model_copy(update={"settings": alone})
    found = verify_plan(as_plan, options.task, executor, lambda words: None, options.trial_time)
    if found.measured is None or not found.holds:
        return math.inf
    return plan.settings.batch.num_samples / found.measured.samples_per_s.value


def save(training: SharedTraining, shares: Sequence[Share], folder: Path) -> Bundle:
    """Write the bundle of a training and its plans.

    Raises:
        UserError: two types of device cannot be told apart.
        PlanError: they cannot be written.
    """
    bundle = training.bundle(shares)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise PlanError(f"{folder}: cannot be made: {reason.strerror}. Choose another folder with -o.") from None
    for member, each in zip(bundle.plans, shares, strict=True):
        each.plan.save(folder / member.plan)
    bundle.save(folder)
    return bundle


def bundle_lines(bundle: Bundle, shares: Sequence[Share], folder: Path) -> Iterator[str]:
    """For people."""
    plans = [each.plan for each in shares]
    last = max(one.step_s for one in bundle.plans)
    yield f"{bundle.effective} samples an optimizer step, expected in {last:.4g} s:"
    for one, plan in zip(bundle.plans, plans, strict=True):
        assert plan.settings.batch is not None, "it states the share"
        times = f"{one.ranks} x " if one.ranks > 1 else ""
        yield (
            f"  {times}{one.describe()}: {count(one.samples, 'sample')} in {one.step_s:.4g} s "
            f"({plan.settings.batch.describe()}): {one.plan}"
        )
    yield from dict.fromkeys(note for plan in plans for note in plan.notes[1:])
    yield f'{folder / BUNDLE}: autotune.load_plan("{folder}") picks the plan for the device that it runs on.'
