"""The options of a search, each declared once: with its type, default, limits, help, and how its text is read.

The command line, a batch's jobs, a service's submissions and a study's record take them from the classes here.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from ..plan import TOLERANCE
from ..script.scratch import Scratch
from ..units import MIB, format_bytes, format_percent, parse_bytes, parse_duration, parse_percent

SamplerName = Literal["gain", "tpe", "gp", "random"]
"""``gain`` is this package's own; the others are Optuna's."""
Panel = Literal["Budget", "Time", "Space", "Batch", "Quality", "Where", "Output"]
"""A group of options in ``--help``."""


@dataclass(frozen=True)
class Shown:
    """How ``--help`` shows an option; its text is the docstring below the field."""

    panel: Panel
    metavar: str | None = None
    """What stands for its value; None is its type."""
    default: str | None = None
    """What is said of the default; None is the default itself."""
    short: tuple[str, ...] = ()
    """Other names, such as ``-o``."""


_WANTED_DROP = (
    "expected how far evaluate's result may fall: a share of the reference's, above 0% and at most 100%, such as 1%; "
    "or a number in its own units, such as 0.5"
)


@dataclass(frozen=True)
class Drop:
    """How far the quality that ``evaluate`` returns may fall."""

    value: float
    """At least 0."""
    is_share: bool
    """Whether ``value`` is a share of the reference's quality, above 0 and at most 1; else it is in its units."""

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf or (self.is_share and not 0 < self.value <= 1):
            raise ValueError(f"{_WANTED_DROP}, but got {self}.")

    def of(self, reference: float) -> float:
        """The allowed drop in units of the quality."""
        return self.value * abs(reference) if self.is_share else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.is_share else f"{self.value:g}"


ANY_DROP = Drop(1.0, is_share=True)
"""For commands that only look at what lossy techniques do, or use a plan whose quality was judged before."""


def read_bytes(text: Any) -> int:
    """A budget in bytes, of at least a MiB.

    Raises:
        ValueError: it is none.
    """
    num_bytes = parse_bytes(text)
    if 0 < num_bytes < MIB:
        raise ValueError(f"a budget of {text} is {num_bytes} bytes. Was {text}GiB meant?")
    if num_bytes <= 0:
        raise ValueError(f"a budget of {text} leaves no memory at all. Write for example 8GiB, 512 MiB or 8GB.")
    return num_bytes


def read_budget(text: Any) -> int | float:
    """Bytes as an int, or a share of the reference's peak as a float.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(text, str) or not text.strip().endswith("%"):
        return read_bytes(text)
    try:
        return parse_percent(text.strip())
    except ValueError:
        raise ValueError(
            f"expected a percentage above 0 of what the job takes as it stands, such as 90%, but got {text!r}."
        ) from None


def _read_drop(text: Any) -> Any:
    if not isinstance(text, str | int | float) or isinstance(text, bool):
        return text  # a drop, or what an earlier study has kept of one
    written = str(text).strip()
    is_share = written.endswith("%")
    try:
        value = float(written.removesuffix("%"))
        return Drop(value / 100 if is_share else value, is_share)
    except ValueError:
        raise ValueError(f"{_WANTED_DROP}, but got {text!r}.") from None


def _check_factor(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"must be a number above 0, but got {value:g}; 1 is as the task has it.")
    return value


def _check_margin(value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"expected a share from 0 up to 1, such as 0.03, but got {value}.")
    return value


def _check_tolerance(value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"expected a share of the outputs from 0 up to 1, such as 0.05, but got {value}.")
    return value


def _check_device(text: str) -> str:
    from ..workers.devices import split_device

    split_device(text)
    if not text.isprintable():
        raise ValueError("printable text on one line was expected")
    return text


def _check_path(text: Any) -> Any:
    if "\0" in str(text):
        raise ValueError("no path has a null byte")
    return text


def _words(text: Any) -> Any:
    return tuple(shlex.split(text)) if isinstance(text, str) else text


def _written(write: Callable[[Any], str]) -> PlainSerializer:
    """The text that is read back as the same value."""
    return PlainSerializer(write, return_type=str, when_used="json")


def _read_seconds(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        parse_duration(f"{value:.9f}")
        return float(value)
    return parse_duration(str(value))


BudgetOption = Annotated[
    int | float,
    BeforeValidator(read_budget),
    _written(lambda budget: format_percent(budget) if isinstance(budget, float) else format_bytes(budget)),
]
"""Bytes as an int, or a share of the reference's peak as a float; ``8GiB`` or ``90%`` in text."""
HostBudgetOption = Annotated[int, BeforeValidator(read_bytes), _written(format_bytes)]
"""Bytes; ``16GiB`` in text."""
Seconds = Annotated[float, BeforeValidator(_read_seconds), _written(lambda seconds: f"{seconds:.10g}s")]
"""``90s``, ``20m`` or ``1.5h`` in text."""
DropOption = Annotated[Drop, BeforeValidator(_read_drop), _written(str)]
PathOption = Annotated[Path, BeforeValidator(_check_path)]


class MeasuredBy(BaseModel):
    """Options that measurements depend on: a study goes on only with the same."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seed: Annotated[int, Field(ge=0, le=2**63 - 1), Shown("Space")] = 0
    """Seeds the task and the sampler."""
    effective_batch: Annotated[int | None, Field(ge=1, le=2**40), Shown("Batch", default="the task's batch_size")] = (
        None
    )
    """Samples that one optimizer step sees, held fixed."""
    allow_split: Annotated[bool, Shown("Batch")] = False
    """Split batches even where that changes the gradient."""
    inference: Annotated[bool, Shown("Space")] = False
    """The job is inference: the task's infer(model, batch) over its samples in eval mode, without gradients."""
    tolerance: Annotated[float, AfterValidator(_check_tolerance), Shown("Space")] = TOLERANCE
    """With --inference: how far each sample's outputs may be from those of the job as it stands, as a share of their
    norm."""
    life: Annotated[bool | None, Shown("Budget", default="what takes less than a quarter of a trial")] = None
    """Measure the rest of the job's life too, and hold it to the budget: an epoch's last batch, saving, resuming, and
    the whole evaluation."""
    max_quality_drop: Annotated[DropOption | None, Shown("Quality", "DROP", "no such technique is tried")] = None
    """Try techniques that change the model, and allow the task's evaluate to fall by so much: 1%, or 0.5. With
    --inference: in place of --tolerance."""
    recovery_steps: Annotated[int, Field(ge=1, le=2**31), Shown("Quality")] = 100
    """With --max-quality-drop: optimizer steps of training before quality is judged."""
    recovery_lr: Annotated[float, AfterValidator(_check_factor), Shown("Quality")] = 1.0
    """With --max-quality-drop: factor on the learning rates in that training."""
    distill: Annotated[bool, Shown("Quality")] = False
    """With --max-quality-drop: candidates also learn from the untouched model's outputs."""


QUALITY = frozenset(
    name
    for name, field in MeasuredBy.model_fields.items()
    if any(isinstance(one, Shown) and one.panel == "Quality" for one in field.metadata) and name != "max_quality_drop"
)
"""Options of how quality is judged: without ``max_quality_drop`` they say nothing."""


class HowToSearch(MeasuredBy):
    """How to search, wherever that is asked for."""

    keep_weights: Annotated[bool, Shown("Quality")] = False
    """With --max-quality-drop: write the winner's recovered weights beside the plan."""
    budget: Annotated[BudgetOption | None, Shown("Budget", "SIZE|PERCENT", "no limit: speed alone")] = None
    """Memory that the device may charge the job: 8GiB or 8G is 2**33 bytes, 8GB is 8 * 10**9; or 90% of what the job
    takes as it stands."""
    margin: Annotated[float, AfterValidator(_check_margin), Shown("Budget")] = 0.03
    """The measured peak times 1 + margin must be within the budget."""
    max_latency: Annotated[Seconds | None, Shown("Budget", "TIME", "no limit")] = None
    """With --inference: the longest that 95 of 100 batches may take on the device: 20ms."""
    host_budget: Annotated[HostBudgetOption | None, Shown("Budget", "SIZE", "no limit")] = None
    """Most of the host's memory that the job may take: loader workers, page-locked memory and a cached epoch count."""
    trials: Annotated[int, Field(ge=1), Shown("Time")] = 24
    """Most configurations to measure, the reference included; repeated runs do not count."""
    max_time: Annotated[Seconds | None, Shown("Time", "TIME", "no limit")] = None
    """Longest time for the whole search, repeated runs of the best included: 90s, 20m, 1.5h."""
    trial_time: Annotated[Seconds, Shown("Time", "TIME", "60s")] = 60.0
    """Longest time for one trial's timed steps; it ends once its speed is known to 2 %: 2s, 1m."""
    space: Annotated[str, Shown("Space", "NAME|FILE")] = "default"
    """Techniques to try: a preset (default, exact, lossy) or a YAML file."""
    sampler: Annotated[SamplerName, Shown("Space")] = "gain"
    """Chooses what to try: gain predicts memory and work, and stops by itself; others are Optuna's."""
    flags: Annotated[Literal["auto", "off"], Shown("Batch")] = "auto"
    """For a script's command without placeholders: auto searches the batch through its own known flags, if they state
    the batch that it is seen to train with; off leaves the batch alone."""
    scratch: Annotated[Scratch, Shown("Where")] = "auto"
    """Run each trial of a script in a folder of its own, removed after it: a copy of the current one, or an empty one.
    auto: a copy of a folder of up to 256 MiB and 5,000 files."""
    fresh: Annotated[bool, Shown("Time")] = False
    """Measure everything anew: take over nothing that earlier searches of this job have measured on this device."""
    ablate: Annotated[bool, Shown("Output")] = False
    """Once the plan is written, measure it again without each of its choices in turn, for `autotune report`."""

    def given(self, names: Iterable[str]) -> list[str]:
        """Those of the options that are not at their defaults, as the command line calls them."""
        fields = type(self).model_fields
        return [option_name(name) for name in names if getattr(self, name) != fields[name].default]

    def not_with_inference(self, is_script: bool = False) -> str | None:
        """Why an option that was given has no place where the job is inference, or needs it; None where none was."""
        if not self.inference:
            given = self.given(["tolerance", "max_latency"])
            return f"{given[0]} is of inference plans. Give --inference too, or leave it out." if given else None
        if is_script:
            return (
                "--inference is of a task file, which defines infer(model, batch). A script is searched as it trains."
            )
        if given := self.given(["keep_weights", "distill", *sorted(QUALITY)]):
            return f"{given[0]} is of what is trained before it is judged. Leave it out with --inference."
        if self.max_quality_drop is not None and self.given(["tolerance"]):
            return (
                "--tolerance is of outputs, in whose place --max-quality-drop has the task's evaluate judge the model. "
                "Give one of them."
            )
        if given := self.given(["life", "allow_split", "effective_batch"]):
            return f"{given[0]} is of training. Leave it out with --inference."
        return None

    def of_scripts_alone(self) -> str | None:
        """Why an option that was given has no place beside a task file; None where none was."""
        if self.given(["scratch"]):
            return "--scratch is for a script's trials. Those of a task file call its functions alone."
        if self.given(["flags"]):
            return "--flags is for a script's own. A task file states its batch: batch_size, micro_batch_size."
        return None

    def asked(self) -> dict[str, Any]:
        """What is not at its default, as text that reads back as the same: for another class of options."""
        return self.model_dump(mode="json", include=set(HowToSearch.model_fields), exclude_defaults=True)


class SearchedJob(HowToSearch):
    """What is to be searched, and how."""

    task: str | None = None
    """``model.py`` or ``model.py:name``."""
    command: Annotated[tuple[str, ...], BeforeValidator(_words), Field(min_length=1)] | None = None
    """In place of a task: what starts a script, such as ``python train.py --batch-size {batch.micro=32}``."""
    device: Annotated[
        Annotated[str, AfterValidator(_check_device)] | None,
        Shown("Where", "cpu|cuda[:NAME]", "cuda where this machine has it, else cpu"),
    ] = None
    """Device type that trials run on; where there are unlike ones, a part of their name and memory: cuda:A100."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.task is None) == (self.command is None):
            raise ValueError("write either `task: model.py` or `command: python train.py …`")
        reason = self.not_with_inference(self.command is not None)
        if self.command is None and reason is None:
            reason = self.of_scripts_alone()
        if reason is not None:
            raise ValueError(reason)
        return self


NOT_SUBMITTED = ("distill", "keep_weights")
"""Options that a service does not have: what it gives back is a plan alone."""


class SearchOptions(HowToSearch):
    """One search of this machine, or of the cluster that it joins."""

    task: str
    """``model.py`` or ``model.py:name``."""
    command: tuple[str, ...] | None = None
    """The job is the script that this starts, with the batch's placeholders in it; ``task`` is then its name."""
    name: str | None = None
    """Of the study and of the folder of its logs; None is the task file's, without its suffix."""
    device: Literal["cpu", "cuda"] = "cpu"
    """torch's device type that trials run on."""
    storage: Annotated[str | None, Shown("Output", "URL", "SQLite under .autotune/")] = None
    """Optuna storage of the study."""
    measurements: Annotated[str | None, Shown("Output", "URL", "SQLite under .autotune/")] = None
    """Where measurements are kept for later searches, and reused from, as a batch has it in --storage."""
    output: Annotated[PathOption, Shown("Output", default="plan.yaml; bundle with --devices", short=("-o",))] = Path(
        "plan.yaml"
    )
    """Where the plan goes, or the bundle."""
    start: Annotated[PathOption | None, Shown("Space", "PLAN.YAML", "the sampler's own")] = None
    """Try this plan's settings first, after the job as it stands: what autotune fit has written."""
    resume: Annotated[bool, Shown("Output")] = False
    """Go on with this task's newest study."""
    require_proof: Annotated[bool, Shown("Output")] = False
    """End with 3 where the plan is not proven to be faster than the job as it stands; it is written all the same."""
    progress: Annotated[PathOption | None, Shown("Output", "FILE")] = None
    """Append one JSON line to it for each thing that happens, for programs."""

    @property
    def stem(self) -> str:
        """Prefix of the study's name."""
        return self.name or Path(self.task).stem

    @property
    def preset(self) -> str:
        """Name of the space: ``default`` becomes ``lossy`` with ``--max-quality-drop``."""
        return "lossy" if self.space == "default" and self.max_quality_drop is not None else self.space


def option_name(field: str) -> str:
    """``--max-time`` of ``max_time``."""
    return f"--{field.replace('_', '-')}"
