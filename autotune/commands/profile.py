"""``autotune profile``: a training step module by module, and again with each technique that may change it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import Interrupted, NothingFits, PlanError, TaskError, UserError
from ..files import check_output, replacing, write_text
from ..measure.profiling.types import Profile, ProfileOptions
from ..plan import Budget, Plan, load_plan
from ..report.page import page
from ..report.printing import print_json, print_words, tell
from ..report.profile import WIDTH, as_json, explain, line
from ..results import Change, Profiling, WhatToProfile
from ..searches.options import ANY_DROP, SearchOptions
from ..searches.requests import LARGEST_OF, check_plan, failure, inspect, reference_settings
from ..searches.time_budget import TimeBudget
from ..task_file import task_file
from ..techniques import TECHNIQUES, Facts, Settings, Technique
from ..techniques.batch import Batch
from ..workers import STOPPED, Executor, Failed, Outcome, OutOfMemory, Profiled, ProfileRequest
from ..workers.trial.environment import own_thread_variables
from .interrupts import interrupts
from .where import Where, trials


@dataclass(frozen=True)
class ProfileForm:
    """How a profile is shown."""

    depth: int | None = None
    """Levels of modules of the table; None is as many as fit a screen."""
    html: Path | None = None
    """Where the page goes; None writes none."""
    json: bool = False
    """Print one JSON document."""


def profile(what: WhatToProfile, plan: Path | None, form: ProfileForm, verbose: bool) -> int:
    """Profile a task, print what was found, and write the files that were asked for.

    Args:
        what: the task and what to do with it; its ``trace`` is where the Chrome trace is to be in the end.
        plan: the plan to apply; None is the job as it stands.
        form: what is printed and written.
        verbose: show what the task prints.

    Returns:
        The exit code: 0, or 130 after a Ctrl-C.

    Raises:
        UserError: a file cannot be written, said before anything runs; or as :func:`profile_task`.
    """
    taken = {"the task": task_file(what.task), "the plan": plan}
    for option, path, other in (("--html", form.html, what.trace), ("--trace", what.trace, None)):
        if path is not None:
            check_output(path, {**taken, "the other output": other}, UserError, option)
    tell(f"reading the task: {what.task}")
    told: list[Facts] = []

    def observe(event: Facts | Settings | Change) -> None:
        tell(line(event, *told))
        told.extend([event] if isinstance(event, Facts) else [])

    in_force = load_plan(plan) if plan else None
    stop = threading.Event()
    with (
        trials(Where("local", verbose=verbose), what.task, what.device) as executor,
        interrupts(stop, executor.close),
        replacing(what.trace, UserError, "--trace") if what.trace else nullcontext() as trace,
    ):
        found = profile_task(replace(what, plan=in_force, trace=trace), executor, observe)
    code = Interrupted.exit_code if stop.is_set() else 0
    if form.html is not None:
        write_text(form.html, page(found, form.depth), UserError, "--html")
    if form.json:
        files = {"html": form.html and str(form.html), "trace": what.trace and str(what.trace)}
        print_json({"exit_code": code, **files, **as_json(found)})
    else:
        print_words(sys.stdout, explain(found, form.depth), WIDTH)
    return code


def profile_task(
    what: WhatToProfile, executor: Executor, observe: Callable[[Facts | Settings | Change], None]
) -> Profiling:
    """Profile a task in a fresh process, then once more for each setting that may change its step.

    Args:
        what: the task and what to do with it.
        executor: runs it; stays the caller's to close, which while techniques are measured leaves the others out.
        observe: is told the facts, the settings that are about to be profiled, and each change that has been.

    Raises:
        TaskError: the task cannot be loaded, or fails for another reason than memory.
        PlanError: the plan asks for what cannot be had here.
        NothingFits: the device does not hold the step.
        Interrupted: the executor was closed before the step was measured.
    """
    if what.plan is not None and what.plan.inference is not None:
        raise PlanError("--plan: it is for inference, and a step of training is profiled. Leave it out.")
    time_budget = TimeBudget(0.0, None)
    options = SearchOptions(
        task=what.task, device=what.device, seed=what.seed, allow_split=True, max_quality_drop=ANY_DROP
    )
    facts = inspect(options, executor, time_budget)
    observe(facts)
    settings = _settings(what, facts)
    asked = _Asked(what, facts, time_budget.deadline_s(0.0, spare_finalists=False))
    observe(settings)
    base = _base(executor.ask(asked.request("profile", settings)), what)
    techniques = () if what.alone else tuple(_techniques(settings, facts))
    changes: list[Change] = []
    for number, technique in enumerate(techniques, 1):
        changed = settings.having(technique)
        outcome = executor.ask(asked.request(f"profile-{number}", changed, False))
        if outcome == STOPPED:
            break
        changes.append(Change(technique, outcome))
        observe(changes[-1])
    return Profiling(what.task, settings, facts, base, tuple(changes), techniques[len(changes) :])


@dataclass(frozen=True)
class _Asked:
    """Makes profile requests."""

    what: WhatToProfile
    facts: Facts
    deadline_s: float

    def request(self, name: str, settings: Settings, is_base: bool = True) -> ProfileRequest:
        """With times and a Chrome trace for the base alone."""
        trace = str(self.what.trace) if self.what.trace and is_base else None
        lengths = self.facts.lengths
        largest_of = LARGEST_OF if self.facts.shapes_vary and lengths is None else None
        timed = {} if is_base else {"num_timed_steps": 0}
        return ProfileRequest(
            id=name,
            task=os.path.abspath(self.what.task),
            seed=self.what.seed,
            device=self.what.device,
            plan=Plan(settings=settings, budget=Budget(device=self.what.device)),
            options=ProfileOptions(trace=trace, largest_of=largest_of, lengths=lengths, **timed),
            deadline_s=self.deadline_s,
            environment=own_thread_variables(),
        )


def _settings(what: WhatToProfile, facts: Facts) -> Settings:
    """What is applied: the plan's settings or the job's own, with the batch that was asked for.

    Raises:
        PlanError: the plan is another model's or cannot be had here, or the dataset is smaller than the batch.
    """
    settings = reference_settings(facts)
    if what.plan is not None:
        check_plan(what.plan, what.task, facts)
        settings = what.plan.settings.model_copy(update={"batch": what.plan.settings.batch or settings.batch})
    if what.batch is None:
        return settings
    if facts.dataset_length is not None and what.batch > facts.dataset_length:
        raise PlanError(f"--batch {what.batch}: the dataset has {facts.dataset_length} samples. Ask for at most that.")
    return settings.having(Batch(micro=what.batch))


def _base(outcome: Outcome, what: WhatToProfile) -> Profile:
    match outcome:
        case Profiled():
            return outcome.profile
        case OutOfMemory():
            raise NothingFits(
                f"{what.task}: the step does not fit on this device: {failure(outcome)}\n"
                "Profile a smaller one with --batch, or one with a plan applied with --plan."
            )
        case _ if outcome == STOPPED:
            raise Interrupted("Interrupted before the step was measured: there is nothing to show.")
        case Failed(traceback=""):
            raise TaskError(outcome.message)
        case _:
            raise TaskError(f"{what.task}: the step cannot be profiled: {failure(outcome)}")


def _techniques(settings: Settings, facts: Facts) -> Iterator[Technique]:
    """Each choice for this model and device that may change the tensors of a step, other than what is applied, and
    that goes with the rest of that."""
    for name, technique in TECHNIQUES.items():
        for choice in technique.choices(facts) if technique.is_in_step() else ():
            changed = settings.having(choice).in_force(facts.precision)
            goes = choice.unavailable(facts) is None and changed.conflict() is None
            if goes and choice != getattr(settings, name).or_default(facts):
                yield choice
