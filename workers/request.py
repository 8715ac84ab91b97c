"""What goes into an isolated trial: one question for one process."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, TypeAdapter

from ..estimates import CheapestOptions, EstimateOptions, PredictOptions
from ..measure import InspectOptions, MeasureOptions
from ..measure.cuts.types import JudgeOptions
from ..measure.exports.types import ExportOptions
from ..measure.profiling.types import ProfileOptions
from ..plan import Plan
from ..techniques import Settings


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    id: str
    """Names the trial in logs."""
    task: str
    """``path/to/model.py`` or ``path/to/model.py:name``."""
    command: tuple[str, ...] | None = None
    """The job is a script that this starts, under our launcher, in place of a task that is loaded."""
    scratch: Literal["auto", "copy", "empty", "off"] = "auto"
    """The script runs in a folder of the trial's own: a copy of the current one, or empty."""
    seed: int = 0
    """Seeds everything before the model is built."""
    device: Literal["cpu", "cuda"]
    """torch's device type."""
    fresh: bool = False
    """Start a new interpreter, as a job is started, instead of forking a server that has imported torch."""
    deadline_s: PositiveFloat = 600.0
    """The trial and its descendants are ended after this."""
    compiling_s: NonNegativeFloat = 600.0
    """Most seconds by which the time that torch.compile takes puts that off."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that the driver hands on (thread counts); the plan's own are added where the trial runs."""

    def of_task(self, task: str) -> Self:
        """The same, for a task that lies elsewhere."""
        return self.model_copy(update={"task": task})

    def with_deadline(self, deadline_s: float, most_s: float = math.inf) -> Self:
        """The same, with more time or less, and no more than ``most_s`` where it compiles."""
        compiling_s = max(0.0, min(self.compiling_s, most_s - deadline_s))
        return self.model_copy(update={"deadline_s": deadline_s, "compiling_s": compiling_s})

    @property
    def latest_s(self) -> float:
        """The deadline of a trial that compiles for as long as it may."""
        return self.deadline_s + self.compiling_s

    @property
    def infers(self) -> bool:
        """Whether the job is the task's inference."""
        return False

    @property
    def applied(self) -> Settings:
        """What is applied in the trial; its variables have to be there when the process starts."""
        return Settings()

    @property
    def memory_limit_bytes(self) -> int | None:
        """What the watchdog ends the trial at; None where it is not enforced."""
        return None


class _PlanRequest(_Request):
    plan: Plan
    """What to apply: settings, and the budget to hold."""

    @property
    def infers(self) -> bool:
        """Whether the plan is for it."""
        return self.plan.inference is not None

    @property
    def applied(self) -> Settings:
        """The plan's."""
        return self.plan.settings


class InspectRequest(_Request):
    """What is known of the task?"""

    kind: Literal["inspect"] = "inspect"
    options: InspectOptions = InspectOptions()

    @property
    def infers(self) -> bool:
        """Whether it is to be."""
        return self.options.inference


class MeasureRequest(_PlanRequest):
    """What does the plan cost?"""

    kind: Literal["measure"] = "measure"
    options: MeasureOptions

    @property
    def memory_limit_bytes(self) -> int | None:
        """Of the host's memory: the budget and a quarter; on a CPU the device's counts too."""
        budget = self.plan.budget
        limit = budget.model_copy(update={"device": "cpu"}).of_device if self.device == "cpu" else budget.host
        return None if not self.options.enforce or limit is None else limit * 5 // 4


class CompareRequest(_Request):
    """Which of two plans of one job is the faster? Both are measured in one place at one time, by turns."""

    kind: Literal["compare"] = "compare"
    one: MeasureRequest
    other: MeasureRequest
    turn_s: PositiveFloat = 1.0
    """Seconds of timed windows in a turn."""
    most_s: PositiveFloat = 60.0
    """No turn begins this long after the first."""
    precision: PositiveFloat = 0.03
    """Turns end once the 95 % interval of the ratio is within this share on either side, or will not be."""

    def of_task(self, task: str) -> Self:
        """Of both sides."""
        sides = {"one": self.one.of_task(task), "other": self.other.of_task(task)}
        return self.model_copy(update={"task": task, **sides})

    def with_deadline(self, deadline_s: float, most_s: float = math.inf) -> Self:
        """Of both sides."""
        one, other = (side.with_deadline(deadline_s, most_s) for side in (self.one, self.other))
        return super().with_deadline(deadline_s, most_s).model_copy(update={"one": one, "other": other})

    @classmethod
    def of(cls, one: MeasureRequest, other: MeasureRequest, most_s: float) -> CompareRequest:
        """Of two requests for one task; both sides have the time that they take together."""
        deadline_s = one.deadline_s + other.deadline_s + most_s
        one, other = (side.model_copy(update={"deadline_s": deadline_s, "fresh": True}) for side in (one, other))
        own = {"id": one.id, "task": one.task, "device": one.device, "deadline_s": deadline_s, "fresh": True}
        compiling_s = one.compiling_s + other.compiling_s
        return cls(**own, compiling_s=compiling_s, one=one, other=other, most_s=most_s)


class ProfileRequest(_PlanRequest):
    """What does a step of the plan take, module by module?"""

    kind: Literal["profile"] = "profile"
    options: ProfileOptions = ProfileOptions()


class JudgeRequest(_PlanRequest):
    """How good are cuts of the model after their recovery, beside the job as it stands, which the plan is of?"""

    kind: Literal["judge"] = "judge"
    options: JudgeOptions


class ExportRequest(_PlanRequest):
    """Write what the plan computes as a file: does it do the same?"""

    kind: Literal["export"] = "export"
    options: ExportOptions


class PredictRequest(_Request):
    """What do configurations take, or which batch of one fits, without having run?"""

    kind: Literal["predict"] = "predict"
    options: PredictOptions | CheapestOptions | EstimateOptions


TrialRequest = Annotated[
    InspectRequest | MeasureRequest | CompareRequest | ProfileRequest | JudgeRequest | ExportRequest | PredictRequest,
    Field(discriminator="kind"),
]
"""Any of them; ``kind`` tells which."""

REQUEST: TypeAdapter[TrialRequest] = TypeAdapter(TrialRequest)
"""Reads a request from JSON: ``REQUEST.validate_json(text)``."""
