"""``autotune profile``: a training step module by module, and again with each technique that may change it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import Interrupted, NothingFits, PlanError, TaskError
from ..measure.profiled import Profile, ProfileOptions
from ..plan import Budget, Plan
from ..techniques import TECHNIQUES, Facts, Settings, Technique
from ..techniques.batch import Batch
from ..workers import STOPPED, Executor, Failed, Outcome, OutOfMemory, Profiled, ProfileRequest
from ..workers.environment import own_thread_variables
from .inquiry import LARGEST_OF, check_plan, failure, inspect, reference_settings
from .options import SearchOptions
from .pace import Pace

__all__ = ["Change", "Profiling", "WhatToProfile", "profile"]


@dataclass(frozen=True)
class WhatToProfile:
    """What the user asked for. Every field is a command-line option of ``autotune profile``."""

    task: str
    """``model.py`` or ``model.py:name``."""
    device: Literal["cpu", "cuda"]
    """torch's device type."""
    plan: Plan | None = None
    """``--plan``: its settings are in force; None is the job as it stands."""
    batch: int | None = None
    """``--batch``: samples in one forward pass, and in one optimizer step; None is the plan's or the task's."""
    alone: bool = False
    """``--alone``: without asking what each technique would change."""
    trace: Path | None = None
    """``--trace``: a Chrome trace of the job, besides."""
    seed: int = 0
    """``--seed``."""


@dataclass(frozen=True)
class Change:
    """The same step with one technique changed."""

    technique: Technique
    """The only setting that differs."""
    outcome: Outcome
    """``Profiled``, or why not."""

    @property
    def profile(self) -> Profile | None:
        """The step; None where it did not come to its end."""
        return self.outcome.profile if isinstance(self.outcome, Profiled) else None


@dataclass(frozen=True)
class Profiling:
    """A step, and what each technique would make of it."""

    task: str
    settings: Settings
    """In force."""
    facts: Facts
    base: Profile
    changes: tuple[Change, ...]
    not_measured: tuple[Technique, ...] = ()
    """What the user's Ctrl-C left out."""


def profile(what: WhatToProfile, executor: Executor, observe: Callable[[Facts | Settings | Change], None]) -> Profiling:
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
    pace = Pace(0.0, None)
    options = SearchOptions(what.task, device=what.device, seed=what.seed, allow_split=True)
    facts = inspect(options, executor, pace)
    observe(facts)
    settings = _settings(what, facts)
    asked = _Asked(what, facts, pace.deadline_s(0.0, spare_finalists=False))
    observe(settings)
    base = _base(executor.ask(asked.request("profile", settings)), what)
    techniques = () if what.alone else tuple(_techniques(settings, facts))
    changes: list[Change] = []
    for number, technique in enumerate(techniques, 1):
        changed = settings.model_copy(update={technique.name: technique})
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
        largest_of = LARGEST_OF if self.facts.shapes_vary else None
        timed = {} if is_base else {"num_timed_steps": 0}
        return ProfileRequest(
            id=name,
            task=os.path.abspath(self.what.task),
            seed=self.what.seed,
            device=self.what.device,
            plan=Plan(settings=settings, budget=Budget(device=self.what.device)),
            options=ProfileOptions(trace=trace, largest_of=largest_of, **timed),
            deadline_s=self.deadline_s,
            environment=own_thread_variables(),
        )


def _settings(what: WhatToProfile, facts: Facts) -> Settings:
    """What is in force: the plan's settings or the job's own, with the batch that was asked for.

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
    return settings.model_copy(update={"batch": Batch(micro=what.batch)})


def _base(outcome: Outcome, what: WhatToProfile) -> Profile:
    match outcome:
        case Profiled():
            return outcome.profile
        case OutOfMemory():
            raise NothingFits(
                f"{what.task}: the step does not fit on this device: {failure(outcome)}\n"
                "Profile a smaller one with --batch, or one with a plan in force with --plan."
            )
        case _ if outcome == STOPPED:
            raise Interrupted("Interrupted before the step was measured: there is nothing to show.")
        case Failed(traceback=""):
            raise TaskError(outcome.message)
        case _:
            raise TaskError(f"{what.task}: the step cannot be profiled: {failure(outcome)}")


def _techniques(settings: Settings, facts: Facts) -> Iterator[Technique]:
    """Each choice for this model and device that may change the tensors of a step, other than what is in force, and
    that goes with the rest of that."""
    for name, technique in TECHNIQUES.items():
        for choice in technique.choices(facts) if technique.is_in_step() else ():
            changed = settings.model_copy(update={name: choice}).in_force(facts.precision)
            goes = choice.unavailable(facts) is None and changed.conflict() is None
            if goes and choice != getattr(settings, name).or_default(facts):
                yield choice
