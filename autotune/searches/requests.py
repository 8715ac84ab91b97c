"""Makes requests for executors: inspect the task, predict, or measure one configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Interrupted, NothingFits, PlanError, TaskError, TrialsLost
from ..estimates import PredictOptions
from ..estimates.cards import on_device
from ..estimates.types import Largest
from ..measure import InspectOptions, MeasureOptions, Parity
from ..measure.cuts.types import JudgeOptions
from ..measure.measurement import Course, EvaluationOptions, LifeOptions
from ..plan import Budget, Evaluation, Evidence, Inference, Plan, TaskRef
from ..script.command import FENCES, filled, own_batch, own_share, under_launcher
from ..script.scratch import Scratch
from ..search_spaces import SearchSpace
from ..techniques import Exactness, Facts, Settings
from ..techniques.batch import Batch
from ..techniques.parallel import Parallel
from ..techniques.support.facts import difference
from ..units import format_bytes
from ..workers import (
    STOPPED,
    Crashed,
    Dropped,
    Executor,
    Failed,
    Inspected,
    InspectRequest,
    JudgeRequest,
    MeasureRequest,
    NonFinite,
    Outcome,
    OutOfMemory,
    PredictRequest,
    TimedOut,
)
from ..workers.outcome import KILLED
from ..workers.trial.environment import own_thread_variables
from .options import Drop, SearchOptions
from .time_budget import TimeBudget

_OF_OTHER_DRAWS = 0.5
"""Where a split of the batch sees other random numbers of a script's: what is left undivided is at least 1.0 off."""
PARITY_LIMITS: Mapping[Exactness, float] = {"exact": 0.01, "rounding": 0.02, "lossy": 0.1}
"""Largest difference of the first loss from the reference's, as a share of the reference's mean loss; n times that for
the n-th."""

LARGEST_OF = 64
"""Where batch shapes vary, the peak is taken on the largest of so many batches."""

_COMPARED = 16
"""Most samples whose outputs are compared in inference."""
_OUTPUTS_S = 1.0
"""Of timed windows of a run which only outputs are wanted of."""

_EVALUATION_SHARE = 0.25
"""Longest evaluation, as a share of the trial's time; so long may saving and resuming take, too."""
_WHOLE_LIFE_S = 300.0
"""Longest of each with ``--life``, if a trial's time is less."""
_LIFE_PHASES = 3
"""That may take so long each."""
_OUTPUT_LINES = 20


_SLEEPING_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Of a process whose speed is not measured: its threads sleep where they wait for each other, and take no processor's
time from those that are waited for. On two processors with seven busy processes beside it, a training took 16 s as it
was and 2 s so."""


@dataclass(frozen=True)
class Requests:
    """Makes requests for one task and budget."""

    task: str
    seed: int
    budget: Budget
    """With its device."""
    facts: Facts
    command: tuple[str, ...] | None = None
    """Of a job that is a script, with its placeholders."""
    scratch: Scratch = "auto"
    """Where the script's trials run, if not in the current folder."""
    reference: Evidence | None = None
    """Of the job as it stands, on a card: a trial leaves room there for what the context had come to."""
    life: bool | None = None
    """``--life``."""
    tolerance: float = 0.05
    """``--tolerance``, of inference."""
    drop: Drop | None = None
    """``--max-quality-drop``, of inference: in place of the tolerance."""

    def request(self, name: str, settings: Settings, measure: MeasureOptions, deadline_s: float) -> MeasureRequest:
        """A request to measure one configuration in a fresh process. It evaluates as the job does today, at most at its
        own micro-batch."""
        batch = self.evaluation_batch(settings) if settings != reference_settings(self.facts) else None
        known = self.facts
        found = TaskRef(source=self.task, fingerprint=known.fingerprint, identity=known.identity)
        return MeasureRequest(
            id=name,
            task=os.path.abspath(self.task),  # a worker's current directory may be another,
            seed=self.seed,
            device=self.facts.device.type,
            plan=Plan(
                settings=settings,
                # how outputs are compared is the options' to say
                inference=Inference(tolerance=self.tolerance) if known.inference else None,
                budget=self.budget,
                evaluation=Evaluation(batch=batch) if batch else None,
                task=found if self.command is not None else None,
                reference=self.reference,
            ),
            options=measure,
            deadline_s=deadline_s + (_LIFE_PHASES * measure.life.most_s if measure.life is not None else 0.0),
            **started(self.command, own_share(settings), self.scratch, batch),
        )

    def evaluating(self, request: MeasureRequest, batch: int) -> MeasureRequest:
        """The same request, with another evaluation batch in its plan, and in the script's flags."""
        plan = request.plan.model_copy(update={"evaluation": Evaluation(batch=batch)})
        anew = started(self.command, own_share(plan.settings), self.scratch, batch)
        return request.model_copy(update={"plan": plan, **anew})

    def evaluation_batch(self, settings: Settings) -> int | None:
        """Samples that a trial evaluates at once; None where the task lets none be chosen."""
        today = self.facts.evaluation_batch
        if settings.batch is not None and settings.batch.flag is not None:  # its samples are a rough number
            return today
        return min(today, settings.batch.micro) if today is not None and settings.batch is not None else today

    def predict_request(
        self,
        every: Sequence[Settings],
        most_s: float | None,
        deadline_s: float,
        to_choose: Sequence[Settings] = (),
        choices: Sequence[Settings] = (),
    ) -> PredictRequest:
        """A request to predict configurations, and to choose for each of ``to_choose`` what is in which blocks, of
        ``choices`` or, without any, what is recomputed: within the budget or, without one, the device's memory."""
        limit_bytes = self.budget.of_device or self.facts.device.memory_bytes
        return PredictRequest(
            id="predict",
            task=os.path.abspath(self.task),
            seed=self.seed,
            device=self.facts.device.type,
            options=PredictOptions(
                settings=tuple(every),
                to_choose=tuple(to_choose),
                **({"choices": tuple(choices)} if choices else {}),
                **on_device(self.facts.device, bool(self.facts.conv_dims), self.facts.tries_kernels),
                limit_bytes=int(limit_bytes / (1 + self.budget.margin)),
                largest_of=largest_of(self.facts),
                model_bytes=4 * self.facts.num_parameters,
                most_s=most_s,
            ),
            deadline_s=deadline_s,
            environment=own_thread_variables(),
        )

    def judge_request(
        self, name: str, reference: Settings, options: JudgeOptions, time_budget: TimeBudget
    ) -> JudgeRequest:
        """A request to judge cuts beside the job as it stands."""
        return JudgeRequest(
            id=name,
            task=os.path.abspath(self.task),
            seed=self.seed,
            device=self.facts.device.type,
            plan=Plan(settings=reference, budget=self.budget),
            options=options,
            deadline_s=time_budget.deadline_s(options.most_s or 0.0, spare_finalists=True),
            environment={**own_thread_variables(), **_SLEEPING_THREADS},
        )

    def measure_options(
        self, settings: Settings, share_s: float, reference: Parity | None, enforce: bool = True
    ) -> MeasureOptions:
        """How long and against what a configuration is measured."""
        exact = exactness(settings, self.facts)
        most_s = max(share_s, _WHOLE_LIFE_S) if self.life else share_s * _EVALUATION_SHARE
        return MeasureOptions(
            trial_time_s=share_s,
            enforce=enforce,
            budget=self.budget,
            parity_batch=None if settings.affect("function") else self._num_compared,
            parity_last=settings.batch is not None and settings.batch.num_samples < self.facts.effective_batch,
            reference_losses=reference.losses or None if reference else None,
            reference_outputs=reference.outputs if reference else None,
            must_compare=self.facts.inference and enforce and exact != "exact",
            tolerance=self.tolerance,
            **self._judging(reference, looks=not enforce),
            reference_course=self._course(reference) if reference else None,
            rounded_losses=reference.rounded if reference and exact != "exact" else (),
            parity_limit=self._parity_limit(settings, exact),
            largest_of=LARGEST_OF if self.facts.shapes_vary and self.facts.lengths is None else None,
            lengths=self.facts.lengths,
            evaluation=EvaluationOptions(most_s=most_s) if self.facts.evaluates and not self.facts.inference else None,
            life=None if self.life is False or self.facts.inference else LifeOptions(most_s=most_s),
        )

    def outputs_request(self, name: str, time_budget: TimeBudget) -> MeasureRequest:
        """A request for the outputs of the job as it stands, in batches of no more samples than are compared: what its
        own batch takes may be more than there is."""
        settings = reference_settings(self.facts).having(Batch(micro=self._num_compared))
        measure = self.measure_options(settings, _OUTPUTS_S, None, enforce=False)
        return self.request(name, settings, measure, time_budget.deadline_s(_OUTPUTS_S, spare_finalists=False))

    def _judging(self, reference: Parity | None, looks: bool) -> dict[str, Any]:
        """Whether the task's ``evaluate`` judges what inference computes, and the least that it has to say; of the
        reference, whether it is looked at."""
        known = None if reference is None else reference.quality
        if self.drop is None:
            return {}
        if known is None:
            return {"judges": True, "looks": looks}
        return {"judges": True, "reference_quality": known, "least_quality": known - self.drop.of(known)}

    @property
    def _num_compared(self) -> int:
        """Samples in the batch whose losses, or outputs, are compared."""
        own = self.facts.effective_batch
        return min(own, _COMPARED) if self.facts.inference else own

    def _course(self, reference: Parity) -> Course | None:
        if reference.course is not None and self.facts.batch_varies:
            return reference.course.model_copy(update={"step_samples": None})
        return reference.course

    def _parity_limit(self, settings: Settings, exact: Exactness) -> float:
        limit, own = PARITY_LIMITS["rounding" if exact == "exact" and self.facts.rounds else exact], self.facts
        drawn = own.draws_between_passes and settings.batch is not None
        return _OF_OTHER_DRAWS if drawn and settings.batch != reference_settings(own).batch else limit


def started(
    command: Sequence[str] | None, batch: Batch | None, scratch: Scratch, evaluation: int | None = None
) -> dict[str, Any]:
    """How a trial's process is started, where the job is a script: with the batches in its flags, and what it might
    tell others of itself kept here. A task's is started as it is."""
    threads = own_thread_variables()
    if command is None:
        return {"environment": threads}
    launched = under_launcher(filled(command, batch, evaluation))
    assert launched is not None, "the command line sees to it"
    fences = {name: value for name, value in FENCES.items() if name not in os.environ}
    return {"command": tuple(launched), "environment": {**fences, **threads}, "scratch": scratch}


def largest_of(facts: Facts) -> Largest | None:
    """By what predictions choose the sample that batches are made of, where shapes vary."""
    if facts.lengths is not None:
        return facts.lengths.largest
    return LARGEST_OF if facts.shapes_vary else None


def reference_settings(facts: Facts) -> Settings:
    """The user's job as it stands: the effective batch cut as the job cuts it, everything else untouched."""
    batch = Batch.reference(facts) if facts.states_batch else None
    return Settings(batch=batch, parallel=Parallel.reference(facts))


def exactness(settings: Settings, facts: Facts) -> Exactness:
    """The least exact of the settings' techniques."""
    found = {technique.exactness(facts) for technique in settings.techniques()}
    return "lossy" if "lossy" in found else "rounding" if "rounding" in found else "exact"


def inspect(
    options: SearchOptions,
    executor: Executor,
    time_budget: TimeBudget,
    runs_model: bool = True,
    in_tokens: bool = False,
) -> Facts:
    """Ask a child process for the task's facts: of :func:`inspected`, which see."""
    return inspected(options, executor, time_budget, runs_model, in_tokens=in_tokens).facts


def inspected(
    options: SearchOptions,
    executor: Executor,
    time_budget: TimeBudget,
    runs_model: bool = True,
    space: SearchSpace | None = None,
    in_tokens: bool = False,
) -> Inspected:
    """Ask a child process for the task's facts.

    Args:
        options: the task, its device, and what the user said.
        executor: runs the child; stays the caller's to close.
        time_budget: its deadline.
        runs_model: False leaves unknown what only a run tells.
        space: of a search: its changes of what the model computes are tried, where they are allowed.
        in_tokens: look at more of a script's batches, which it may make by tokens.

    Returns:
        Them, with what the task printed and how long it took.

    Raises:
        TaskError: the task cannot be loaded or inspected; carries the user's traceback.
        NothingFits: the device does not hold the model with one sample.
        Interrupted: the executor was closed on the user's Ctrl-C.
    """
    is_changed = options.max_quality_drop is not None and options.command is None and not options.inference
    tries = space.changes() if space is not None and is_changed else {}
    request = InspectRequest(
        id="inspect",
        task=os.path.abspath(options.task),
        seed=options.seed,
        device=options.device,
        options=InspectOptions(
            effective_batch=options.effective_batch,
            allow_split=options.allow_split,
            allow_lossy=options.max_quality_drop is not None,
            runs_model=runs_model,
            inference=options.inference,
            in_tokens=in_tokens,
            tries={name: tuple(Settings(**{name: one}) for one in row) for name, row in tries.items()},
        ),
        deadline_s=time_budget.deadline_s(0.0, spare_finalists=False),
        **started(
            options.command,
            own_batch(options.command, options.effective_batch) if options.command else None,
            options.scratch,
        ),
    )
    outcome = executor.ask(request)
    if isinstance(outcome, Inspected):
        return outcome
    if outcome == STOPPED:
        raise Interrupted("Interrupted while the task was being inspected; nothing had been measured.")
    if isinstance(outcome, Failed) and not outcome.traceback:
        raise TaskError(outcome.message)
    job = "task" if options.command is None else "script"
    if isinstance(outcome, OutOfMemory):
        raise NothingFits(
            f"{options.task}: the {job} cannot be inspected, since it does not fit on this device: "
            f"{failure(outcome)}\nFree memory there, or make the model or its samples smaller."
        )
    refuse_killed(options.task, outcome)
    raise TaskError(f"{options.task}: the {job} cannot be inspected: {failure(outcome)}")


def check_plan(plan: Plan, task: str, facts: Facts) -> Facts:
    """Check that a plan is for this task.

    Returns:
        The facts with the plan's own batch for the effective one: another than the task's is the plan's to choose.

    Raises:
        PlanError: it was found for another model, or one of its settings cannot be had here.
    """
    if plan.task is not None and plan.task.fingerprint != facts.fingerprint:
        raise PlanError(
            f"plan: it was found for {plan.task.source} ({plan.task.fingerprint[:15]}…), but {task} is another task "
            f"({facts.fingerprint[:15]}…): {difference(plan.task.identity, facts.identity)}. "
            f"Search again: `autotune search {task}`."
        )
    batch = plan.settings.batch
    if batch is not None and batch.flag is not None and batch.tokens is not None:
        facts = facts.by_flag(batch.flag, batch.tokens, is_proven=True) or facts
        facts = facts.model_copy(update={"micro_batch": batch.micro})
    facts = facts.model_copy(update={"effective_batch": batch.num_samples}) if batch is not None else facts
    for technique in plan.settings.techniques():
        if (reason := technique.unavailable(facts)) is not None:
            raise PlanError(f"plan: settings.{technique.name}: cannot be had here: {reason}.")
    if (reason := plan.settings.in_force(facts.precision).conflict()) is not None:
        raise PlanError(f"plan: settings: {reason}.")
    return facts


def refuse_killed(task: str, outcome: Outcome) -> None:
    """A job that was killed as it stands does not fail by itself: the search says nothing of it.

    Raises:
        TrialsLost: so it was.
    """
    if isinstance(outcome, Crashed) and outcome.message.startswith(KILLED):
        raise TrialsLost(
            f"{task}: {outcome.message.partition(chr(10))[0]}: something ended the job as it stands from outside. The "
            "kernel does so where the machine's memory is short, and says so in its log (dmesg)."
        )


def failure(outcome: Outcome) -> str:
    """Why a trial did not end well, with the user's traceback or the last of the output where they say more."""
    output = outcome.output.strip()
    match outcome:
        case Failed():
            traceback = outcome.traceback.strip()
            said = "\n\n".join(filter(None, (outcome.message, traceback)))
            output = output.replace(traceback, "").strip()  # a script has printed it, too
        case OutOfMemory():
            return f"out of memory at {format_bytes(outcome.peak_bytes)}: {outcome.message}"
        case TimedOut():
            said = f"it did not end within {outcome.deadline_s:.0f} s. {outcome.message}".rstrip()
        case Crashed() | Dropped():
            said = outcome.message
        case NonFinite():
            said = outcome.message or f"the loss is not finite at optimizer step {outcome.step}."
        case _:
            raise AssertionError(f"{outcome.kind} is no failure")
    tail = "\n".join(output.splitlines()[-_OUTPUT_LINES:])
    return f"{said}\n\nIts last output:\n{tail}" if tail else said
