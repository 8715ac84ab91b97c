"""``Plan``: one choice per technique and the evidence it was chosen on. The YAML file is this object, nothing else."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, field_validator, model_validator

from .bundle import chosen_plan
from .errors import PlanError
from .files import read_text, replacing, write_text
from .plain_yaml import dump_yaml, explain, read_yaml
from .techniques import Exactness, Settings
from .techniques.support.facts import Identity, InTf32, Longest
from .units import Bytes, Percent, Ratio

_Whole = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of things, or a seed."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TaskRef(_Section):
    """The task that a plan was found for."""

    source: str
    """The task's file as it was given, ``model.py`` or ``model.py:name``."""
    fingerprint: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    """Hash of parameter names, shapes, dtypes, trainable flags, and batch shapes, before any technique."""
    identity: Identity | None = None
    """The same in words, which tell another task in what it differs; absent in a plan of an earlier version."""


class Excess(NamedTuple):
    """A peak that is over the budget."""

    num_bytes: int
    """By so much, with what the margin adds."""
    budget: str
    """Which budget that is, in words."""
    option: str
    """That gives it."""
    needed_bytes: int
    """What it would have to be."""
    ratio: float
    """That over what it is."""


class Budget(_Section):
    """What the device may charge the training process, and what the job may take of the host's memory."""

    limit: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes; absent when the search had no limit."""
    of_reference: Percent | None = None
    """The share of the reference's measured peak that was asked for; ``limit`` is what that came to."""
    host: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes of the host's memory for the job, its loader workers included; absent without such a limit. On a CPU, the
    device's memory is the host's, and the smaller limit holds."""
    latency_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Of inference: the longest that 95 of 100 batches may take, seconds; absent without such a limit."""
    device: Literal["cpu", "cuda"] | None = None
    """torch's device type; absent in a plan written by hand for whatever device there is."""
    margin: float = Field(default=0.03, ge=0, lt=1)
    """The measured peak times 1 + margin stays within the limit, and so does the host's within its own."""
    as_it_stands: Literal[True] | None = None
    """Of the job as it stands, whose own peak the limit is a share of, at 100 % or more: it is admitted as it is. The
    limit is then no less than any of its measured peaks, and a later one may be above it by the margin; absent in any
    other plan."""

    @property
    def factor(self) -> float:
        """What a measured peak is multiplied by before it is held against the limit."""
        return 1 / (1 + self.margin) if self.as_it_stands else 1 + self.margin

    @property
    def of_device(self) -> int | None:
        """Bytes of the device's memory: on a CPU the smaller of both limits; None without one."""
        limits = [self.limit, self.host if self.device == "cpu" else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def holds(self, peak_bytes: int) -> bool:
        """Whether a configuration to which the device has charged so much fits."""
        return self.over(Peak(process=peak_bytes)) is None

    def over(self, peak: Peak) -> Excess | None:
        """How far this measured peak is over the limit that it exceeds most; None where it fits."""
        return max(self.excesses(peak), key=lambda one: one.ratio, default=None)

    def excesses(self, peak: Peak) -> list[Excess]:
        """How far this measured peak is over each limit that it exceeds."""
        found = []
        if self.limit is not None:
            found.append(_excess(peak.process, self.factor, self.limit, "the budget", "--budget"))
        on_host = peak.process if peak.host is None and self.device != "cuda" else peak.host
        if self.host is not None and on_host is not None:
            found.append(_excess(on_host, 1 + self.margin, self.host, "the host's budget", "--host-budget"))
        return [one for one in found if one.num_bytes > 0]

    def of_job(self, *peaks_bytes: int) -> Self:
        """The same for the job as it stands, of which these peaks were measured: they differ from run to run, and a
        limit that is a share of at least all of its own is not below one of them."""
        if (self.of_reference or 0) < 1:
            return self
        limit = None if self.limit is None else max([self.limit, *peaks_bytes])
        return self.model_copy(update={"as_it_stands": True, "limit": limit})


def _excess(peak_bytes: int, factor: float, limit: int, budget: str, option: str) -> Excess:
    needed = peak_bytes * factor
    return Excess(math.ceil(needed - limit), budget, option, math.ceil(needed), needed / limit)


class Speed(_Section):
    """Samples per second with a 95 % interval."""

    value: PositiveFloat = Field(allow_inf_nan=False)
    """Samples consumed per wall second."""
    low: float = Field(ge=0, allow_inf_nan=False)
    """Lower end of the 95 % interval."""
    high: float = Field(allow_inf_nan=False)
    """Upper end."""
    repeats: Annotated[_Whole, Field(gt=0)] = 1
    """Fresh processes that it was measured in."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"low <= value <= high was expected, but got {self.low}, {self.value}, {self.high}")
        return self


PhaseName = Literal["first_step", "training", "last_batch", "evaluation", "saving", "resuming"]
"""``first_step`` is all up to the end of it, which makes the optimizer's state; ``last_batch`` an epoch's, which is
smaller; ``resuming`` a process of its own that loads what was saved, and trains on."""


ROOM = 2.0
"""Above the largest of some processes' peaks, in what they differ by: what another process is granted."""


class PhasePeak(_Section):
    """Largest memory of a phase of the job's life."""

    process: Bytes
    """What the device charged the process."""
    host: Bytes | None = None
    """CUDA: the process's host memory."""
    low: Bytes | None = None
    """Of a phase that was seen in part and extended: lower end of the 95 % interval of ``process``."""
    high: Bytes | None = None
    """Upper end."""


class Peak(_Section):
    """Largest memory over the repeats."""

    process: Bytes
    """What the device charged the process: what the budget is held against."""
    spread: Bytes | None = None
    """By how much the repeats differ in it; absent where they do not, or there was one."""
    reserved: Bytes | None = None
    """CUDA: the allocator's largest reservation."""
    allocated: Bytes | None = None
    """CUDA: the largest sum of live tensors."""
    host: Bytes | None = None
    """CUDA: what the job took of the host's memory: the process at its largest, and its loader workers at theirs. On a
    CPU ``process`` is that."""
    workers: Bytes | None = None
    """Of it, what loader workers took beside the process, with the batches that they had ready; absent without any."""
    allocator_retries: _Whole = 0
    """CUDA: how often the allocator had to free its cache and try again."""
    above_base: Bytes | None = None
    """CPU: what the training took beside what lay there before it: interpreter, torch, imports, data. Where importing
    took more than training, ``process`` tells nothing of a smaller model, and this does."""
    tensors: Bytes | None = None
    """CPU: the largest sum of live tensors, as predicted: what counts on a card."""
    largest_of: Annotated[_Whole, Field(gt=0)] | None = None
    """Batch shapes vary: the peak is that of the largest of so many batches."""
    longest: Longest | None = None
    """Batch shapes vary: the peak is that of the largest batch that samples can make, by their lengths."""
    phases: dict[PhaseName, PhasePeak] = Field(default={}, exclude_if=lambda phases: not phases)
    """Of each phase of the job's life that was measured; ``process`` above is the largest."""
    binds: PhaseName | None = None
    """Which of them that is."""

    def next_bytes(self, margin: float) -> int:
        """What another process is not expected to exceed: the largest with its margin, or with :data:`ROOM` times what
        they differ by."""
        return round(self.process + max(margin * self.process, ROOM * (self.spread or 0)))

    def with_phases(self, phases: Mapping[PhaseName, PhasePeak]) -> Self:
        """With other rows, at the largest of what they need and what is known already."""
        if not phases:
            return self
        most = max(phases, key=lambda name: phases[name].process)
        process = max(self.process, phases[most].process)
        above = None if self.above_base is None else self.above_base + process - self.process
        return self.model_copy(update={"phases": dict(phases), "binds": most, "process": process, "above_base": above})


class Latency(_Section):
    """How long one batch takes in inference, from the device to its outputs there."""

    median_s: PositiveFloat = Field(allow_inf_nan=False)
    """Seconds."""
    p95_s: PositiveFloat = Field(allow_inf_nan=False)
    """95 of 100 batches take no longer."""

    def exceeds(self, budget: Budget) -> bool:
        """Whether it is over the budget's."""
        return budget.latency_s is not None and self.p95_s > budget.latency_s


class Evidence(_Section):
    """What one configuration was measured at, in fresh interpreters."""

    samples_per_s: Speed
    """Its speed."""
    peak: Peak
    """Its memory."""
    compile_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds that torch.compile took at the median of the processes, which the speed leaves out; absent without it."""
    latency: Latency | None = None
    """Of inference: one batch, the largest of the processes'; absent otherwise."""
    fits: bool = True
    """Whether it stays within the budget (a reference may not)."""

    def over(self, budget: Budget) -> str:
        """``the budget``, ``the latency`` or both, where it does not fit; else nothing."""
        is_slow = self.latency is not None and self.latency.exceeds(budget)
        is_over = budget.over(self.peak) is not None or not (is_slow or self.fits)
        return " and ".join(["the budget"] * is_over + ["the latency"] * is_slow) * (not self.fits)


class Foreseen(_Section):
    """What is predicted of a plan that ``autotune fit`` made, from traces alone."""

    process: Bytes
    """What the device is likely to charge the process."""
    low: Bytes
    """Lower end of the interval."""
    high: Bytes
    """Upper end: at most one peak in twenty is to be above. It times 1 + margin stays within the budget."""
    reference: Bytes
    """What the device is likely to charge the job as it stands."""
    work: Ratio
    """Predicted time of an optimizer step, over that of the job as it stands."""
    speeds: str | None = None
    """What times are predicted by, as measured on the device; absent where work was counted alone."""
    how: Literal["traced", "probed"] = "traced"
    """``traced`` over fake tensors; ``probed`` by a few real steps."""
    binds: str
    """Where the peak is, and what fills it."""


class Gain(_Section):
    """The plan against the reference."""

    speed: Ratio | None
    """Samples per second over the reference's; null when the reference could not be measured."""
    low: Ratio | None = None
    """Lower end of its 95 % interval over the rounds in which the two took turns; absent with fewer than two."""
    high: Ratio | None = None
    """Upper end."""
    rounds: Annotated[_Whole, Field(gt=0)] | None = None
    """How many rounds: fresh processes of each."""
    turns: Annotated[_Whole, Field(gt=0)] | None = None
    """Of each, over all rounds, where both lived at once; absent where one ran after the other."""
    memory: Ratio | None
    """Peak over the reference's."""
    reason: str | None = None
    """Why there is no gain to state."""
    unproven: str | None = None
    """Why the plan is not known to be faster than the reference, which fits too; absent where it is known."""

    @property
    def is_proven(self) -> bool:
        """Whether the plan is known to be faster than the reference."""
        return self.low is not None and self.low > 1


class Evaluation(_Section):
    """How the job evaluates between its steps, which its peak includes."""

    batch: Annotated[_Whole, Field(gt=0)] | None = None
    """Samples at once: the ``batch_size`` of ``evaluate``, or of a script's own flag; absent where neither is."""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """One evaluation; absent where it was always stopped before its end, or none was seen."""
    training: Bytes | None = None
    """The largest peak of training alone; absent of a script."""


TOLERANCE = 0.05
"""How far outputs may differ where nothing else is said, as a share of their norm."""


class Inference(_Section):
    """Of a plan for inference: how its outputs were compared."""

    tolerance: float | None = Field(default=None, ge=0, lt=1)
    """How far each sample's outputs may be from those of the job as it stands, as a share of their norm; absent where
    ``evaluate`` judges in its place."""
    deviation: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """How far they are at most; absent where nothing was compared."""
    max_drop: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """How far what ``evaluate`` says may be below what it says of the job as it stands, in its units; absent where it
    does not judge."""
    quality: float | None = Field(default=None, allow_inf_nan=False)
    """What it said of the plan's model, without training, of its own examples."""
    reference_quality: float | None = Field(default=None, allow_inf_nan=False)
    """Of the job as it stands."""

    @model_validator(mode="after")
    def _check_is_compared_by_one(self) -> Self:
        if (self.tolerance is None) == (self.max_drop is None):
            got = "neither" if self.tolerance is None else "both"
            raise ValueError(
                f"wanted tolerance, of outputs, or max_drop, of what evaluate says, but got {got}. Write one, such as "
                f"tolerance: {TOLERANCE}"
            )
        return self


class QualityEvidence(_Section):
    """How good the plan's model is beside the reference's, after the same training; higher is better."""

    value: float = Field(allow_inf_nan=False)
    """The mean of what ``evaluate`` said of the plan's."""
    reference: float = Field(allow_inf_nan=False)
    """Of the reference's."""
    max_drop: float = Field(ge=0, allow_inf_nan=False)
    """How much lower was allowed, in the same units."""
    pairs: Annotated[_Whole, Field(gt=0)]
    """Seeds from which both were trained."""
    most_lost: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """How much lower than the reference's it is at most, at 95 %; below 0 where it is better."""
    over_examples: bool | None = None
    """Whether that holds for other examples as well as for other seeds; false where ``evaluate`` returned a number
    alone, whose error over examples is not known."""
    samples: Annotated[_Whole, Field(gt=0)]
    """Samples that each was trained on before it was judged."""
    recovered: str | None = None
    """That training in words: its steps, and whether learning rates went by the job's own schedule; absent in a plan of
    an earlier version."""
    lr_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Times the task's learning rates in that training; absent, as the task has them."""
    distilled: Literal[True] | None = None
    """Whether the plan's model learned from the untouched one too; absent where it did not."""


class KeptWeights(_Section):
    """What the winner's recovery made of its model: weights to train on from, in a file beside the plan's."""

    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    """Of that file."""
    quality: float = Field(allow_inf_nan=False)
    """What ``evaluate`` said of them."""
    seed: _Whole
    """Of the training that made them: the first that was judged, whatever the others came to."""
    path: str | None = None
    """Where the file was found; not written into the plan's own."""

    @property
    def file(self) -> str:
        """Its name."""
        return f"weights-{self.hash.removeprefix('sha256:')[:16]}.pt"


class Environment(_Section):
    """Where the evidence was measured."""

    torch: str
    """torch's version."""
    device: str
    """The device as its vendor calls it."""
    driver: str | None = None
    """The device's driver."""
    autotune: str
    """This package's version."""
    python: str
    """Python's version."""
    threads: Annotated[_Whole, Field(gt=0)] | None = None
    """On a CPU: threads that torch computed with."""
    tf32: tuple[InTf32, ...] | None = None
    """On a CUDA device that has TF32: what of fp32 computes in it by torch's flags, as the job leaves them. By torch's
    default convolutions do, in the reference too."""
    card: str | None = None
    """Of a CUDA device: its clock, power and heat while the plan was measured on it, in words; absent where its driver
    tells nothing."""


class SearchRecord(_Section):
    """How the plan was found."""

    trials: _Whole
    """Configurations measured, the reference included."""
    known: _Whole | None = None
    """Configurations that other searches of the task had measured, beside these."""
    seconds: float = Field(ge=0, allow_inf_nan=False)
    """Wall time of the search, finalists included."""
    stopped: str
    """Why it ended, in words."""
    study: str
    """The Optuna study's name."""
    sampler: str
    """The sampler that proposed."""
    seed: _Whole
    """Seed of the task and of the sampler."""


class Plan(_Section):
    """One choice per technique, plus the evidence it was chosen on.

    ``Plan(settings=…)`` alone is a plan without evidence: what a trial applies, and what may be written by hand.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True, title="autotune plan"
    )

    schema_: Literal["autotune/plan@1"] = Field(default="autotune/plan@1", alias="schema")
    """The format's name and version."""
    task: TaskRef | None = None
    """The task; absent in a plan that may be applied to any."""
    inference: Inference | None = None
    """Of a plan for inference; absent of one for training."""
    budget: Budget = Budget()
    """The limit and the device."""
    settings: Settings
    """One row per technique that departs from the user's own setting."""
    exactness: dict[str, Exactness] = Field(default={})
    """How each of these may change the result of this task; empty in a plan written by hand."""
    checked: Literal["losses", "sums", "outputs", "quality"] | None = None
    """What of its first steps was held against the reference's: each loss, or, where runs differ by themselves, their
    sum; of a script, the learning rates and the samples of a step too; of inference, its outputs, or
    their structure and its quality. Absent where nothing was."""
    notes: tuple[str, ...] = ()
    """What a reader must know, such as an effective batch that was not held or a lossy choice."""
    predicted: Foreseen | None = None
    """Of a plan that nobody has measured yet: ``autotune verify`` does, and ``autotune search --start`` goes on from
    it."""
    measured: Evidence | None = None
    """The plan's own evidence."""
    reference: Evidence | None = None
    """The user's job as it stands."""
    evaluation: Evaluation | None = None
    """How the job evaluates; absent where nothing is known of it."""
    quality: QualityEvidence | None = None
    """Of a plan that changes what the model computes."""
    weights: KeptWeights | None = None
    """What to train on from in place of the task's own weights; absent unless ``--keep-weights`` asked for it."""
    gain: Gain | None = None
    """The plan against the reference."""
    environment: Environment | None = None
    """Where it was measured."""
    search: SearchRecord | None = None
    """How it was found."""

    @property
    def evaluation_batch(self) -> int | None:
        """Samples that it evaluates at once; None where nothing says."""
        return None if self.evaluation is None else self.evaluation.batch

    @field_validator("settings")
    @classmethod
    def _check_go_together(cls, settings: Settings) -> Settings:
        if (reason := settings.conflict()) is not None:
            raise ValueError(reason)
        return settings

    def to_yaml(self) -> str:
        """The file's text; :meth:`from_yaml` reads it back to an equal plan."""
        left_out: dict[str, Any] = {"settings": True, "gain": True, "weights": {"path"}}
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=left_out)
        ordered: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            key = field.alias or name
            if name == "settings":
                ordered[key] = self.settings.written()
            elif name == "gain" and self.gain is not None:
                unknown = {
                    key
                    for key in ("low", "high", "rounds", "turns", "reason", "unproven")
                    if getattr(self.gain, key) is None
                }
                ordered[key] = self.gain.model_dump(mode="json", exclude=unknown)
            elif key in data and data[key] not in ([], {}):
                ordered[key] = data[key]
        return dump_yaml(ordered)

    @classmethod
    def from_yaml(cls, text: str, source: str = "plan") -> Self:
        """Parse a plan's text; ``source`` names it in errors.

        Raises:
            PlanError: not YAML, not a plan, or an unknown technique or value.
        """
        data = read_yaml(text, source, PlanError)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise PlanError(explain(error, source, cls)) from None

    def on(self, device: Literal["cpu", "cuda"]) -> Self:
        """The same plan, for this device where it names none."""
        if self.budget.device is not None:
            return self
        return self.model_copy(update={"budget": self.budget.model_copy(update={"device": device})})

    def save(self, path: str | Path) -> None:
        """Write the YAML file whole or not at all, and what lies beside it before that.

        Raises:
            PlanError: the path cannot be written.
        """
        for name, content in self.settings.files().items():
            with replacing(Path(path).with_name(name), PlanError) as temporary:
                temporary.write_bytes(content)
        if self.weights is not None and self.weights.path is not None:
            with replacing(Path(path).with_name(self.weights.file), PlanError) as temporary:
                shutil.copyfile(self.weights.path, temporary)
        write_text(Path(path), self.to_yaml(), PlanError)


def load_plan(path: str | Path) -> Plan:
    """Read a plan; builds nothing, and touches no device.

    Args:
        path: a YAML file written by ``autotune search`` (or by hand); what its settings keep beside it is read too.
            Or a folder that ``autotune search --devices`` wrote, of which the plan for this process's
            device is read: its name is asked for then.

    Returns:
        The plan.

    Raises:
        PlanError: no such file, not YAML, not a plan, or an unknown technique or value; or none for this device.
    """
    path = chosen_plan(Path(path)) if os.path.isdir(path) else Path(path)  # which says no of a name that none can have
    try:
        text = read_text(path, "plan", PlanError)
    except FileNotFoundError:
        raise PlanError(f"{path}: no such file. `autotune search model.py` writes a plan.") from None
    plan = Plan.from_yaml(text, str(path))
    found: dict[str, Any] = {"settings": plan.settings.with_files(path.parent)}
    if plan.weights is not None:
        found["weights"] = plan.weights.model_copy(update={"path": str(path.absolute().with_name(plan.weights.file))})
    return plan.model_copy(update=found)
