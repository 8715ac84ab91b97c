"""What comes back from a trial: data, never an exception that crosses a process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, TypeAdapter

from ..estimates import Cheapest, Estimate, Prediction
from ..measure import Measurement
from ..measure.cuts.types import Cuts
from ..measure.exports.types import ExportedFile
from ..measure.measurement import Evaluated
from ..measure.profiling.types import Profile
from ..plan import Peak
from ..techniques import Device, Facts, Settings


class _Outcome(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    output: str = ""
    """What the trial printed, captured at file-descriptor level: the first and the last 32 KiB."""
    seconds: float = 0.0
    """Wall time of the whole trial, as its parent saw it."""
    where: str = ""
    """The device that ran it, as its executor names it; empty where nothing does."""


class Inspected(_Outcome):
    """The answer to an inspect request."""

    kind: Literal["inspected"] = "inspected"
    facts: Facts
    """What is known of the task."""


class Measured(_Outcome):
    """The trial ran to its end."""

    kind: Literal["measured"] = "measured"
    measurement: Measurement
    """What it cost; it may still be over the budget, leak, or stray."""
    applied: Settings | None = None
    """The settings with all that was decided as they were applied; None where that is nothing beyond the request."""
    device: Device | None = None
    """What it ran on, as the worker read it; None of a table's."""

    def at_peak_of(self, peaks: Sequence[Peak], evaluations: Sequence[tuple[Evaluated, ...]] = ()) -> Measured:
        """The same at the memory of several processes, this one's among them: of the host's their sum; on CUDA the
        largest, since each has a device of its own.

        Args:
            peaks: of each process, in their order.
            evaluations: of each process, where it made any.
        """
        largest = max(peaks, key=lambda peak: peak.process)
        update: dict[str, Any] = {"peak": largest, "bytes_by_rank": tuple(peak.process for peak in peaks)}
        has_devices = largest.reserved is not None
        if has_devices:
            hosts = {name: sum(getattr(peak, name) or 0 for peak in peaks) or None for name in ("host", "workers")}
            update["peak"] = largest.model_copy(update=hosts)
        else:
            beside = [peak.above_base for peak in peaks]
            above = None if None in beside else sum(filter(None, beside))
            workers = sum(peak.workers or 0 for peak in peaks) or None
            whole = {"process": sum(peak.process for peak in peaks), "workers": workers, "above_base": above}
            update["peak"] = largest.model_copy(update=whole)
        if evaluations:
            one = evaluations[peaks.index(largest)]
            update["evaluations"] = one if has_devices else tuple(map(_together, zip(*evaluations, strict=False)))
        return self.model_copy(update={"measurement": self.measurement.model_copy(update=update)})


def _together(by_rank: tuple[Evaluated, ...]) -> Evaluated:
    """The first process's evaluation, at the memory of all."""
    totals = {name: sum(getattr(one, name) or 0 for one in by_rank) for name in ("before_bytes", "peak_bytes")}
    return by_rank[0].model_copy(update=totals)


class Profiled(_Outcome):
    """The answer to a profile request."""

    kind: Literal["profiled"] = "profiled"
    profile: Profile
    """One optimizer step, by module."""


class Estimated(_Outcome):
    """The answer to an estimate request."""

    kind: Literal["estimated"] = "estimated"
    estimate: Estimate
    """What a combination of techniques takes, without having run."""
    others: tuple[Estimate, ...] = ()
    """The same for each of the other cards that were asked about."""


class Chosen(_Outcome):
    """The answer to the question which combination is the cheapest that fits."""

    kind: Literal["chosen"] = "chosen"
    found: Cheapest
    """What was chosen, and what is predicted of it."""
    notes: tuple[str, ...] = ()
    """What a reader must know of a script's steps."""


class Predicted(_Outcome):
    """The answer to a predict request."""

    kind: Literal["predicted"] = "predicted"
    predictions: tuple[Prediction | None, ...]
    """Of each configuration that was asked for, as far as something could be said in the time there was."""
    probed: str | None = None
    """Why the model could not be traced, where steps at small batches were run instead."""
    refused: tuple[tuple[Settings, str], ...] = ()
    """Combinations that cannot be put on the model, and why: of those nothing can be said."""


class CutsJudged(_Outcome):
    """The answer to a judge request."""

    kind: Literal["cuts_judged"] = "cuts_judged"
    found: Cuts
    """What came of each cut."""


class Exported(_Outcome):
    """The answer to an export request."""

    kind: Literal["exported"] = "exported"
    file: ExportedFile
    """What was written, and how it compares."""


class OutOfMemory(_Outcome):
    """The device, the watchdog, or the kernel refused more memory."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    peak_bytes: int
    """Memory charged when it ended: the configuration needs at least this much."""
    message: str
    """Who refused, and where."""
    of_host: bool = False
    """Whether that is the host's memory, of a trial on a card."""


def host_ran_out(why: str) -> str:
    """The message of a trial on a card that a lack of the host's memory ended, which its budget has nothing to do
    with."""
    return (
        f"the host's memory ran out, and not the device's: {why.rstrip('. ')}. Fewer loader workers or a smaller "
        "prefetch_factor take less; where /dev/shm is full, give it more (of a container: --shm-size)."
    )


class TimedOut(_Outcome):
    """The trial was ended at its deadline."""

    kind: Literal["timed_out"] = "timed_out"
    deadline_s: float
    """The deadline."""
    message: str = ""
    """What it was doing: the phase, and the Python stack where it could be had."""


class Crashed(_Outcome):
    """The process ended without an answer: a signal, or an exit behind Python's back."""

    kind: Literal["crashed"] = "crashed"
    message: str
    """``Segmentation fault (SIGSEGV)``, or the exit code, and what it was doing."""


KILLED = "Killed (SIGKILL)"
"""How the message of a :class:`Crashed` begins that somebody else ended, as the kernel does where memory is short."""


class NonFinite(_Outcome):
    """The loss was not a finite number."""

    kind: Literal["non_finite"] = "non_finite"
    step: int
    """Optimizer step, counted from 1."""
    message: str = ""
    """The value, and where."""


class Failed(_Outcome):
    """The user's code raised, or the request asked for what cannot be done."""

    kind: Literal["failed"] = "failed"
    message: str
    """The last line: exception class and message."""
    traceback: str = ""
    """The user's traceback without our frames; empty where the message says all (a TaskError, a PlanError)."""


class Dropped(_Outcome):
    """Its quality is not proven to be within what may be lost: what a search makes of several measurements."""

    kind: Literal["dropped"] = "dropped"
    message: str
    """The qualities, and what was allowed."""


class Lost(_Outcome):
    """What runs trials failed, and not the trial: a full or missing disk, a server that was killed.

    It says nothing of the configuration, so nobody stores it: it is tried again, and then the search ends.
    """

    kind: Literal["lost"] = "lost"
    message: str
    """What failed and where, and what to do about it."""


class Turn(BaseModel):
    """A turn of each of two trials, one right after the other."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rates: tuple[PositiveFloat, PositiveFloat]
    """Samples per second of the one and of the other."""
    disturbed: float = Field(default=0.0, ge=0, le=1)
    """Share of the time that other work took, of the more disturbed of the two."""

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of the one's speed over the other's."""
        return math.log(self.rates[0] / self.rates[1])


DISTURBED = 0.05
"""Share of a run's or a turn's time from which on, if other work took it, its speed does not count."""


class Compared(_Outcome):
    """The answer to a compare request."""

    kind: Literal["compared"] = "compared"
    one: Annotated[Measured | OutOfMemory | TimedOut | Crashed | NonFinite | Failed, Field(discriminator="kind")]
    other: (
        Annotated[Measured | OutOfMemory | TimedOut | Crashed | NonFinite | Failed, Field(discriminator="kind")] | None
    )
    """None where it was not started, since the one had failed."""
    turns: tuple[Turn, ...]
    """In time; fewer where a side failed."""


COMPARED: TypeAdapter[Compared] = TypeAdapter(Compared)


def sides_of(outcome: Outcome) -> tuple[Outcome | None, ...]:
    """Both of two that took turns; else the outcome itself."""
    return (outcome.one, outcome.other) if isinstance(outcome, Compared) else (outcome,)


Outcome = Annotated[
    Inspected
    | Measured
    | Compared
    | Profiled
    | Estimated
    | Chosen
    | Predicted
    | CutsJudged
    | Exported
    | OutOfMemory
    | TimedOut
    | Crashed
    | NonFinite
    | Failed
    | Dropped
    | Lost,
    Field(discriminator="kind"),
]
"""Any of them; ``kind`` tells which."""

STOPPED = Crashed(message="stopped: the executor was closed")
"""What a trial comes to that the executor's end cut off."""

OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)
"""Reads an outcome from JSON: ``OUTCOME.validate_json(text)``."""
