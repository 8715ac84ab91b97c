"""What has happened so far in a search, gathered from its events; every display draws this."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..measure import Measurement
from ..search.budget import asked
from ..search.events import (
    BudgetKnown,
    Event,
    FinalistEnded,
    Inspected,
    PredictionEnded,
    PredictionStarted,
    SearchStarted,
    Stopped,
    TrialEnded,
    TrialStarted,
    Warned,
)
from ..search.options import SearchOptions
from ..techniques import Facts, Settings
from ..workers import Measured

__all__ = ["Ended", "Progress", "Running"]


@dataclass(frozen=True)
class Running:
    """A trial in flight."""

    label: str
    """``trial 3`` or ``finalist, round 2``."""
    settings: Settings
    since: float
    """The clock when it started, seconds."""


@dataclass(frozen=True)
class Ended:
    """A trial's end, as one row of the display."""

    label: str
    settings: Settings
    event: TrialEnded | FinalistEnded


class Progress:
    """Consumes events in order; holds no text."""

    def __init__(self, options: SearchOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self.budget = asked(options)
        self.facts: Facts | None = None
        self.started: SearchStarted | None = None
        self.reference: Measurement | None = None
        self.best: tuple[Settings, Measurement] | None = None
        self.ended: list[Ended] = []
        self.num_trials_ended = 0
        self.finalist_round: tuple[int, int | None] | None = None
        self.stopped: str | None = None
        self.predicting: int | None = None
        """Configurations whose memory is being predicted; None before and after."""
        self._clock = clock
        self._began = clock()
        self._trial_seconds: list[float] = []
        self._running: dict[tuple[int, int | None], Running] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search was asked for."""
        return self._clock() - self._began

    @property
    def running(self) -> tuple[Running, ...]:
        """Trials in flight, oldest first."""
        return tuple(self._running.values())

    @property
    def num_trials(self) -> int:
        """Configurations that will be measured at most, those of a resumed study included."""
        return self.started.num_trials if self.started else self.options.trials

    @property
    def trials_left_s(self) -> float | None:
        """About how long until no more configurations are tried; None before one has ended.

        The median trial so far, times those left, over those that run at once; never past ``--max-time``.
        """
        if self.stopped is not None or not self._trial_seconds:
            return None
        median = sorted(self._trial_seconds)[len(self._trial_seconds) // 2]
        left = max(self.num_trials - self.num_trials_ended, 0) * median / max(len(self._running), 1)
        if self.options.max_time_s is not None:
            left = min(left, max(self.options.max_time_s - self.elapsed_s, 0.0))
        return left

    def running_s(self, running: Running) -> float:
        """Seconds that a trial has been running."""
        return self._clock() - running.since

    def observe(self, event: Event) -> None:
        """Take in what the search says."""
        match event:
            case Inspected(facts):
                self.facts = facts
            case SearchStarted():
                self.started = event
                for earlier in event.resumed:
                    self._trial_ended(earlier)
            case TrialStarted(number, settings, finalist_round):
                label = trial_label(number) if finalist_round is None else finalist_label(number)
                self._running[number, finalist_round] = Running(label, settings, self._clock())
                if finalist_round is None:
                    self.stopped = self.finalist_round = None  # a finalist fell, and the search goes on
            case TrialEnded():
                self._trial_ended(event)
            case FinalistEnded(number, settings, finalist_round):
                self._running.pop((number, finalist_round), None)
                self.finalist_round = (finalist_round, event.num_rounds)
                self.ended.append(Ended(finalist_label(number), settings, event))
            case BudgetKnown(budget):
                self.budget = budget
            case Stopped(reason):
                self.stopped = reason
            case PredictionStarted(num_configurations):
                self.predicting = num_configurations
            case PredictionEnded():
                self.predicting = None
            case Warned():
                pass

    def _trial_ended(self, event: TrialEnded) -> None:
        self._running.pop((event.number, None), None)
        self.num_trials_ended += 1
        self._trial_seconds.append(event.outcome.seconds)
        self.ended.append(Ended(trial_label(event.number), event.settings, event))
        if isinstance(event.outcome, Measured):
            if event.number == 0:
                self.reference = event.outcome.measurement
            if event.is_best:
                self.best = (event.settings, event.outcome.measurement)


def trial_label(number: int) -> str:
    """How a trial is called: 0 is the reference."""
    return "reference" if number == 0 else f"trial {number}"


def finalist_label(number: int) -> str:
    """How a finalist's run is called."""
    return "reference again" if number == 0 else f"trial {number} again"
