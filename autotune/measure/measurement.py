"""Requests and results of a measurement: plain data, which the driver reads without importing torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from ..plan import Budget, Latency, Peak, Speed
from ..techniques import Settings
from ..techniques.support.facts import Lengths
from .timing.turns import TurnOptions

Stopped = Literal["precise", "slower", "no_surer", "time", "over"]
"""What ended timing: the interval is narrow enough; the configuration is surely slower than the speed to beat; the
interval no longer gets narrower; the time is over, or the script; the peak is over the budget."""
OUT: frozenset[Stopped] = frozenset({"slower", "over"})
"""What ends the timing of a configuration that can win no more."""

NUM_STEPS = 10
"""Optimizer steps whose losses are compared with the reference's."""

NO_EVALUATION = (
    "the script did not evaluate within its trials, so that peaks are those of training alone. If it does later, with "
    "larger batches or longer sequences, have it evaluate early, by its own flags."
)
"""What a trial of a script warns of."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class InspectOptions(_Frozen):
    """Command-line options that bear on the facts."""

    effective_batch: PositiveInt | None = None
    """``--effective-batch``."""
    allow_split: bool = False
    """``--allow-split``."""
    allow_lossy: bool = True
    """Whether ``--max-quality-drop`` was given, or a plan is used that is proven."""
    runs_model: bool = True
    """Run the model and time the loader; False leaves unknown what only that tells."""
    inference: bool = False
    """``--inference``."""
    in_tokens: bool = False
    """Of a script: look at more of its batches, since its command, or a plan, has a flag for their tokens."""
    tries: dict[str, tuple[Settings, ...]] = {}
    """Changes of what the model computes that are made to it once, by technique, each alone; empty is what ``auto``
    has. What cannot be made is said."""


class QualityOptions(_Frozen):
    """How quality is measured: train further, then call the task's ``evaluate``."""

    num_samples: PositiveInt
    """Samples to train on first, in whole optimizer steps."""
    least_early: float | None = None
    """After a quarter of the samples, a quality below this ends the measurement; None always goes on."""
    lr_factor: PositiveFloat = 1.0
    """Of the learning rate of every group of the optimizer, as the task has it."""
    looks: bool = False
    """Look at ``evaluate`` itself: whether it sees the model, and how far it scatters."""
    distill: bool = False
    """Learn from the untouched model's outputs too, where the configuration is another."""
    keep: str | None = None
    """The file that the weights are written to in the end; None writes none."""


class EvaluationOptions(_Frozen):
    """How the task's ``evaluate`` is measured, beside a training that is held in memory."""

    most_s: PositiveFloat
    """Seconds after which it is stopped, where it next calls the model."""
    batches: tuple[PositiveInt, ...] = ()
    """Evaluation batches to try, upward, while they stay within the budget; empty is the one that the plan says."""


class LifeOptions(_Frozen):
    """How what a job does beside its training steps is measured: an epoch's last batch, saving, resuming."""

    most_s: PositiveFloat
    """Seconds that each may take: what is likely to take longer is left out."""
    state: str | None = None
    """The file that the training's state is saved to, which stays for a process that resumes; None is one that is
    removed."""


class Course(_Frozen):
    """Of a script's first ten optimizer steps, what its losses alone do not tell."""

    rates: tuple[tuple[float, ...], ...] = ()
    """The learning rate of each parameter group, at each step."""
    step_samples: float | None = None
    """Samples of an optimizer step, at the median; None where less than two were made."""


class MeasureOptions(_Frozen):
    """How long and how precisely to measure."""

    trial_time_s: PositiveFloat = 60.0
    """The time share of the timed windows, seconds."""
    precision: PositiveFloat = 0.02
    """Measuring ends once the 95 % interval is within this share of the value on either side."""
    to_beat: PositiveFloat | None = None
    """Samples per second that a configuration has to reach: one that is surely slower is timed no longer, and its
    losses are not compared. None times each to the precision, or to the end of its time."""
    may_be_unsure: bool = False
    """Measuring also ends where the interval is hardly narrower than it was at half as many windows: on a machine that
    is never quiet the precision is not reached."""
    enforce: bool = True
    """Hold the process to the budget; False for the reference, which may be over it."""
    plain_loop: bool = False
    """Keep from step to step what a plain loop keeps: set for the reference, which is the user's job as it stands."""
    budget: Budget | None = None
    """With ``enforce``: once the peak is over it, a few windows are enough. None measures to the end."""
    parity_batch: PositiveInt | None
    """Samples in an optimizer step of the parity run: the reference's effective batch, whatever the trial's is. None
    makes none."""
    parity_last: bool = False
    """Leave the parity run for after the measurement: its larger steps would raise the peak of a smaller batch."""
    reference_losses: tuple[float, ...] | None = None
    """The reference's losses over its parity run; None for the reference itself."""
    reference_course: Course | None = None
    """The reference's first steps; None for the reference itself, and for a task, whose steps are ours."""
    reference_outputs: str | None = None
    """Of inference: the reference's outputs, :attr:`Parity.outputs`; None for the reference itself."""
    must_compare: bool = False
    """Of inference: what rounds or is lossy, which is not used without the reference's outputs."""
    tolerance: float = 0.05
    """Of inference: how far each sample's outputs may be from them, as a share of their norm."""
    judges: bool = False
    """Of inference: the task's ``evaluate`` judges the model in place of that tolerance."""
    looks: bool = False
    """Look at ``evaluate`` itself, as :attr:`QualityOptions.looks` has it."""
    reference_quality: float | None = None
    """What it said of the reference, :attr:`Parity.quality`; None for the reference itself."""
    least_quality: float | None = None
    """What it has to say of others."""
    sums_only: bool = False
    """Compare the sum of the losses alone: each hangs on random numbers that a configuration draws otherwise."""
    rounded_losses: tuple[float, ...] = ()
    """Those of the reference from rounded weights, where this may round: :attr:`Parity.rounded`."""
    parity_limit: PositiveFloat = 0.01
    """Largest deviation of step 1 from the reference, as a share of its mean loss; step n may deviate n times that."""
    largest_of: PositiveInt | None = None
    """Batch shapes vary: take the peak on the largest of so many batches."""
    lengths: Lengths | None = None
    """Batch shapes vary, and lengths are known: take the peak on the largest batch that samples can make."""
    evaluation: EvaluationOptions | None = None
    """Evaluate after the timed windows, so that the peak includes it; None does not."""
    life: LifeOptions | None = None
    """Measure the other phases of the job's life after the timed windows, so that the peak includes them; None does
    not."""
    resumes_from: str | None = None
    """The file of a training's state to go on from, as a job resumes, or, of a script, one that is older than what it
    has saved; None begins anew."""
    turns: TurnOptions | None = None
    """Take turns with another process; None measures alone."""
    quality: QualityOptions | None = None
    """Measure quality too, in the same process, once its peak is known; None does not."""

    def is_out(self, stopped: Stopped) -> bool:
        """Whether a trial that ended so can win no more: no leak is looked for, and no losses are compared.

        Before there is a speed to beat, what is over the budget may be told as the nearest miss, and its losses may be
        what others' are compared with.
        """
        return self.to_beat is not None and stopped in OUT


class Parity(_Frozen):
    """The losses of the first ten optimizer steps, with dropout off, against the reference's."""

    losses: tuple[float, ...]
    """Mean loss of each optimizer step."""
    deviation: float = Field(default=0.0, ge=0)
    """Largest difference from the reference, as a share of the reference's mean loss."""
    rounded: tuple[float, ...] = ()
    """The reference's alone: its losses from weights that were rounded to bfloat16 once. What rounding comes to for
    this job: little of a loss of 2, and a good part of one that is nearly 0."""
    strayed_at: PositiveInt | None = None
    """First optimizer step beyond the limit, counted from 1; None where all are within it."""
    course: Course | None = None
    """Of a script."""
    unlike: str | None = None
    """In what else it trains otherwise than the reference, with what to change; None where in nothing."""
    outputs: str | None = Field(default=None, repr=False)
    """Of inference, the reference's alone: some of its outputs, packed by :mod:`.checks.outputs`."""
    quality: float | None = Field(default=None, allow_inf_nan=False)
    """Of inference: what the task's ``evaluate`` said of the model, where it judges."""
    quality_error: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Its standard error, :attr:`Quality.error`."""
    quality_noise: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The reference's alone: :attr:`Quality.noise`."""
    compared: Literal["losses", "sums", "outputs", "quality"] | None = None
    """What was held against the reference's: each loss, or their sum, beside the course; of inference, the outputs, or
    their structure and the quality; None where nothing was."""

    @property
    def is_other_training(self) -> bool:
        """Whether what was compared differs by more than it may."""
        return self.strayed_at is not None or self.unlike is not None


class Quality(_Frozen):
    """The result of ``evaluate`` after further training; higher is better."""

    value: float = Field(allow_inf_nan=False)
    """After all of the training; after a quarter where that ruled the configuration out."""
    error: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Standard error as ``evaluate`` returns it, or that of the mean of its scores; 0 where it returns neither."""
    num_examples: PositiveInt | None = None
    """That it returned a score of each; None where it returned none."""
    scores: str | None = Field(default=None, repr=False)
    """Theirs, of :mod:`.checks.scores`."""
    early: float | None = None
    """The quality after a quarter of the training; None where it was not evaluated."""
    noise: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """How far two evaluations of one model are apart that draw other random numbers; None where that was not looked
    at."""
    is_whole: bool = True
    """Whether all of the training was done."""
    recovered: str | None = None
    """That training in words; None where not all of it was done."""
    seconds: float = Field(default=0.0, ge=0)
    """What training and evaluating took."""


class Growth(_Frozen):
    """What piles up from one batch of an evaluation to the next: outputs that are kept, losses with their graphs."""

    bytes_per_batch: PositiveFloat
    """What a batch adds."""
    num_batches: PositiveInt
    """Batches that it is seen from."""
    all_batches: PositiveInt | None = None
    """Of the whole evaluation; None is not known."""
    seen_bytes: int
    """The most that the process was charged by the last of the batches that were seen."""
    whole_bytes: int | None = None
    """What the whole evaluation comes to; None where that was seen, or its batches are not known."""
    low_bytes: int | None = None
    """Lower end of the 95 % interval of that."""
    high_bytes: int | None = None
    """Upper end."""

    def lasts(self, limit_bytes: float) -> int:
        """Batches after which so much memory is used up."""
        return max(0, math.floor(self.num_batches + (limit_bytes - self.seen_bytes) / self.bytes_per_batch))


class Evaluated(_Frozen):
    """What one evaluation took, with the training held in memory."""

    batch: PositiveInt | None
    """The ``batch_size`` that ``evaluate`` was called with; None where it takes none."""
    seconds: float = Field(ge=0)
    """Wall time."""
    num_samples: int = Field(default=0, ge=0)
    """Samples in its calls of the model; 0 where it did not call it."""
    largest_call: int = Field(default=0, ge=0)
    """Samples in the largest of these."""
    is_whole: bool = True
    """Whether it came to its end; False where it was stopped for time or memory."""
    before_bytes: int | None = Field(default=None, ge=0)
    """Peak of the process before it; None of a script, which may evaluate before it trains."""
    peak_bytes: int = Field(ge=0)
    """Peak of the process after it."""
    growth: Growth | None = None
    """What piles up in it; None where nothing was seen to."""
    kept_bytes: int | None = None
    """What each evaluation leaves behind, and the next adds to; None where that is nothing."""

    @property
    def needed_bytes(self) -> int:
        """The peak of the process once it has come to its end."""
        return max(self.peak_bytes, (self.growth.whole_bytes if self.growth else None) or 0)


class CardState(_Frozen):
    """A GPU while something was timed on it; None is what its driver does not tell."""

    clock_mhz: int | None
    """Mean clock of its multiprocessors."""
    least_clock_mhz: int | None
    """The lowest of them."""
    lowered: tuple[str, ...]
    """Why it was lowered, if it was; not by a limit of power, which what is computed reaches by itself."""
    power_w: float | None
    """Mean power."""
    power_limit_w: float | None = None
    """The limit of its power, where that is set below the card's default."""
    temperature_c: int | None
    """The highest temperature."""
    others: float | None
    """Mean share of its time that other processes computed."""


class Measurement(_Frozen):
    """Speed, memory and losses of one configuration in one process."""

    samples_per_s: Speed
    """Samples consumed per wall second, epoch starts amortised."""
    peak: Peak
    """Largest memory over the whole process, its evaluations included."""
    bytes_by_rank: tuple[int, ...] = ()
    """Of a trial of several processes, what each was charged, in their order."""
    parity: Parity
    """Losses compared with the reference's."""
    num_steps: PositiveInt
    """Optimizer steps within timed windows."""
    num_windows: PositiveInt
    """Timed windows."""
    loader_wait: float = Field(ge=0, le=1)
    """Share of the timed windows spent waiting for data."""
    optimizer_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the timed windows spent in the optimizer's own steps."""
    disturbed: float = Field(default=0.0, ge=0, le=1)
    """Share of the timed windows that other work on the machine, or a pause of it, took."""
    calm: float = Field(default=1.0, ge=0, le=1)
    """Share of the timed seconds that the speed comes from: less than 1 where windows that other work disturbed are
    left out."""
    card: CardState | None = None
    """The GPU meanwhile; None of a CPU's, and where its driver tells nothing."""
    stopped: Stopped = "time"
    """What ended timing. Where that is :meth:`MeasureOptions.is_out`, ``parity.losses`` is empty, unless the job is a
    script."""
    epoch_start_s: float = Field(ge=0)
    """Seconds from asking for an epoch to its first batch."""
    compile_s: float = Field(default=0.0, ge=0)
    """Seconds that torch.compile took; with a warm cache where something alike was compiled on this machine before."""
    graph_breaks: tuple[str, ...] = ()
    """Where torch.compile broke what it compiled into pieces, and why; the reasons are torch's."""
    leak_bytes_per_step: float | None = None
    """Memory gained by each optimizer step without end; None where it is stable."""
    evaluations: tuple[Evaluated, ...] = ()
    """What evaluating took; empty where nothing was evaluated."""
    quality: Quality | None = None
    """Of the model after more training; None where it was not asked for."""
    latency: Latency | None = None
    """Of inference: what one batch takes."""
    phases_s: dict[str, float]
    """Seconds in ``load`` (torch and the user's file), ``apply``, ``parity``, ``warmup``, ``timed``, ``evaluation``,
    ``saving``, ``leak``, and where they are asked for, ``rounded`` and ``quality``; of a script, in the first,
    ``warmup`` and ``timed``."""
    warnings: tuple[str, ...] = ()
    """What the user should hear."""

    @property
    def training_bytes(self) -> int:
        """The peak of training alone."""
        if (row := self.peak.phases.get("training")) is not None:
            return row.process
        before_bytes = self.evaluations[0].before_bytes if self.evaluations else None
        return self.peak.process if before_bytes is None else before_bytes
