"""The executor contract: what goes into an isolated trial, and who runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from ..errors import TrialsLost
from ..estimate import EstimateOptions, PredictOptions
from ..measure import InspectOptions, MeasureOptions
from ..measure.profiled import ProfileOptions
from ..plan import Plan
from .outcome import Lost, Outcome

__all__ = ["Executor", "TrialRequest", "ended", "result_of"]

_WAIT_S = 0.2


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TrialRequest(_Frozen):
    """One question for one fresh process."""

    id: str
    """Names the trial in logs."""
    task: str
    """``path/to/model.py`` or ``path/to/model.py:name``."""
    seed: int = 0
    """Seeds everything before the model is built."""
    kind: Literal["inspect", "measure", "profile", "estimate", "predict"] = "measure"
    """What to do with the task."""
    device: Literal["cpu", "cuda"]
    """torch's device type."""
    plan: Plan | None = None
    """What to apply: settings, and the budget to hold. None to inspect, and to predict."""
    inspect: InspectOptions = InspectOptions()
    """For ``kind: inspect``."""
    measure: MeasureOptions | None = None
    """For ``kind: measure``."""
    profile: ProfileOptions = ProfileOptions()
    """For ``kind: profile``."""
    estimate: EstimateOptions = EstimateOptions()
    """For ``kind: estimate``."""
    predict: PredictOptions = PredictOptions()
    """For ``kind: predict``."""
    fresh: bool = False
    """Start a new interpreter, as a job is started, instead of forking a server that has imported torch."""
    deadline_s: PositiveFloat = 600.0
    """The trial and its descendants are ended after this."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that the driver hands on (thread counts); the plan's own are added where the trial runs."""

    @property
    def memory_limit_bytes(self) -> int | None:
        """What the watchdog ends the trial at on a CPU: the budget and a quarter; None where it is not enforced."""
        if self.device != "cpu" or self.plan is None or self.measure is None or not self.measure.enforce:
            return None
        if self.plan.budget.limit is None:
            return None
        return self.plan.budget.limit * 5 // 4


def ended(futures: Collection[Future[Outcome]]) -> set[Future[Outcome]]:
    """Those that have ended, as soon as one has.

    It never waits for long at once: a signal that comes between Python's last look for one and a wait is handled when
    that wait ends.
    """
    while not (found := wait(futures, _WAIT_S, FIRST_COMPLETED).done):
        pass
    return found


def result_of(future: Future[Outcome]) -> Outcome:
    """What a trial came to.

    Raises:
        TrialsLost: what runs trials failed, time and again.
    """
    outcome = future.result()
    if isinstance(outcome, Lost):
        raise TrialsLost(f"trials cannot be run: {outcome.message}")
    return outcome


class Executor(ABC):
    """Runs trial requests somewhere, each in a process of its own. Use as a context manager."""

    num_slots: int
    """Trials that run at once: one per device."""

    @abstractmethod
    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request. The future gets an outcome whatever a trial did; it raises ``TrialsLost`` only where there
        is nothing left that could run one."""

    def ask(self, request: TrialRequest) -> Outcome:
        """Submit a request and wait for its outcome.

        Raises:
            TrialsLost: what runs trials failed, time and again.
        """
        future = self.submit(request)
        ended([future])
        return result_of(future)

    @abstractmethod
    def close(self) -> None:
        """End every process this executor started, and their descendants. Futures still open get ``Crashed``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
