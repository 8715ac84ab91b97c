"""What an event of a search is: it says itself, so that displays and programs know none by its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, Protocol

from ..measure import Measurement
from ..plan import Budget
from ..techniques import Facts, Settings
from ..words import outcome_words
from ..workers import Measured, Outcome, OutOfMemory


class Known(Protocol):
    """What events have told so far, the one that is said included."""

    facts: Facts | None
    budget: Budget
    """As it was asked for, or in bytes."""
    reference: Measurement | None
    """Trial 0's."""


class Event(ABC):
    """Something that happened in a search."""

    kind: ClassVar[str]
    """Its name in the file of ``--progress``: other programs go by it."""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind

    @abstractmethod
    def words(self, known: Known) -> str:
        """One plain line."""

    def row(self, known: Known) -> dict[str, Any]:
        """What a line of ``--progress`` has of it: plain data, sizes in bytes."""
        return {}


class Run(Event):
    """A run begins or ends."""

    settings: Settings

    @property
    def run(self) -> Hashable:
        """The same of its start and its end: tells it from others that run at the time, where there may be any."""
        return self.kind.partition("_")[0]

    @property
    @abstractmethod
    def label(self) -> str:
        """How it is called: ``trial 3``."""


class RunStarted(Run):
    """A run is about to begin."""

    by_turns: bool = False
    """Whether the reference lives at the same time, and the two take turns."""


class RunEnded(Run):
    """A run has ended."""

    outcome: Outcome
    is_shown: ClassVar[bool] = True
    """Whether it has a row in the panel."""

    def held_to(self, budget: Budget) -> Budget:
        """The budget that it is held to: the job as it stands may be admitted as it is."""
        peaks = [self.outcome.measurement.peak.process] if isinstance(self.outcome, Measured) else []
        return budget.of_job(*peaks) if getattr(self, "number", None) == 0 else budget


def outcome_row(outcome: Outcome, budget: Budget) -> dict[str, Any]:
    """What the row of a run that ended has of its outcome."""
    row = {"outcome": outcome.kind, "words": outcome_words(outcome, budget), "seconds": outcome.seconds}
    if isinstance(outcome, Measured):
        speed, peak = outcome.measurement.samples_per_s, outcome.measurement.peak
        row |= {"samples_per_s": speed.value, "samples_per_s_low": speed.low, "samples_per_s_high": speed.high}
        row["peak_bytes"] = peak.process
    if isinstance(outcome, OutOfMemory):
        row["peak_bytes"] = outcome.peak_bytes
    return row
