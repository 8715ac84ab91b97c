"""What has happened so far in a search, gathered from its events; every display draws this."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...measure import Measurement
from ...search.budget import asked
from ...search.duration import FRESH_EXTRA_S, Costs, Runs, likely_s, likely_trials
from ...search.events import (
    AblationEnded,
    AblationStarted,
    AnchorEnded,
    AnchorStarted,
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
from ...search.options import SearchOptions
from ...search.time_budget import NUM_FINALISTS, NUM_REPEATS
from ...techniques import Facts, Settings
from ...workers import Measured, Outcome
from ..words import remark

__all__ = ["ANCHOR_LABEL", "Ended", "Progress", "Running"]

ANCHOR_LABEL = "reference again, as an anchor"
_ABLATED, _ANCHOR = -1, -2
"""In place of a trial's number: runs of the ablation come one after the other, and anchors do."""


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
    event: TrialEnded | FinalistEnded | AblationEnded


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
        self._began = self._phase_began = clock()
        self._trials: list[TrialEnded] = []
        self._again: list[FinalistEnded] = []
        """Of the finalists that are in force: since one fell, others may have been tried."""
        self._fallen: set[int] = set()
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
    def left_s(self) -> float | None:
        """About how long the search goes on, its finalists included; None before a trial has ended, once the plan is
        written, and while more rounds than planned are run.

        The trials that are likely left, and the finalists, each with what its like have taken; less what those that
        run have had of it. Never past ``--max-time``.
        """
        costs = self._costs()
        if costs is None or (_ABLATED, None) in self._running or self.is_unsure:
            return None
        left = likely_s(self._runs_left(), costs, max(len(self._running), 1))
        longest_s = max(costs.trial_s, costs.fresh_s)
        left -= sum(min(self.running_s(each), longest_s) for each in self.running) / max(len(self._running), 1)
        if self.options.max_time_s is not None:
            left = min(left, self.options.max_time_s - self.elapsed_s)
        return max(left, 0.0)

    @property
    def is_unsure(self) -> bool:
        """Whether the planned rounds of finalists were too few, and another runs."""
        return any(number is not None and number > NUM_REPEATS for _, number in self._running)

    @property
    def phase_s(self) -> float | None:
        """Seconds that the task has been read, or memory predicted; None where neither is done now."""
        if self.facts is not None and self.predicting is None:
            return None
        return self._clock() - self._phase_began

    def is_idle(self) -> bool:
        """Whether nothing is in flight whose end would be worth waiting for."""
        return not self._running and (self.facts is None or self.predicting is not None)

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
                    self._again.clear()
            case TrialEnded():
                self._trial_ended(event)
            case FinalistEnded(number, settings, finalist_round):
                self._running.pop((number, finalist_round), None)
                self.finalist_round = (finalist_round, event.num_rounds)
                self._again.append(event)
                self.ended.append(Ended(finalist_label(number), settings, event))
                if number and remark(event.outcome, self.budget) is not None:
                    self._fell(number)
            case AnchorStarted(settings):
                self._running[_ANCHOR, None] = Running(ANCHOR_LABEL, settings, self._clock())
            case AnchorEnded():
                self._running.pop((_ANCHOR, None), None)
            case AblationStarted(without, _, settings):
                self.finalist_round = None
                self._running[_ABLATED, None] = Running(without_label(without), settings, self._clock())
            case AblationEnded(without, _, settings):
                self._running.pop((_ABLATED, None), None)
                self.ended.append(Ended(without_label(without), settings, event))
            case BudgetKnown(budget):
                self.budget = budget
            case Stopped(reason):
                self.stopped = reason
            case PredictionStarted(num_configurations):
                self.predicting = num_configurations
                self._phase_began = self._clock()
            case PredictionEnded():
                self.predicting = None
            case Warned():
                pass

    def _costs(self) -> Costs | None:
        """What runs have taken so far; None before one has ended."""
        if not self._trials:
            return None
        trial_s = statistics.median(each.outcome.seconds for each in self._trials)
        again_s = statistics.median(each.outcome.seconds - _compared_s(each.outcome) for each in self._trials)
        fresh = [each.outcome.seconds for each in self._again if each.round > 0]
        return Costs(trial_s, again_s, statistics.median(fresh) if fresh else again_s + FRESH_EXTRA_S)

    def _runs_left(self) -> Runs:
        trials = 0
        if self.stopped is None and self.finalist_round is None:
            likely = likely_trials(self.num_trials, self.options.sampler, self.num_trials_ended)
            trials = max(likely, len(self._running))
        candidates = sum(each.number > 0 for each in self._usable()) + max(trials - 1, 0)
        firsts = [each for each in self._again if each.round == 0]
        fresh = [each for each in self._again if each.round > 0]
        compared = min(NUM_FINALISTS, candidates) if candidates > 1 and not fresh else 0
        is_reference = bool(fresh) and fresh[0].number == 0
        by_round = 1 if is_reference or not candidates else 2
        return Runs(trials, max(compared - len(firsts), 0), max(by_round * NUM_REPEATS - len(fresh), 0))

    def _usable(self) -> list[TrialEnded]:
        return [each for each in self._trials if each.feasible and each.number not in self._fallen]

    def _fell(self, number: int) -> None:
        """What did not hold when it was measured again is the best no more."""
        self._fallen.add(number)
        usable = [
            (each.settings, each.outcome.measurement) for each in self._usable() if isinstance(each.outcome, Measured)
        ]
        self.best = max(usable, key=lambda each: each[1].samples_per_s.value, default=None)

    def _trial_ended(self, event: TrialEnded) -> None:
        self._running.pop((event.number, None), None)
        self.num_trials_ended += 1
        self._trials.append(event)
        self.ended.append(Ended(trial_label(event.number), event.settings, event))
        if isinstance(event.outcome, Measured):
            if event.number == 0:
                self.reference = event.outcome.measurement
            if event.is_best:
                self.best = (event.settings, event.outcome.measurement)


def _compared_s(outcome: Outcome) -> float:
    """Seconds of a trial in which its losses were compared with the reference's."""
    return outcome.measurement.phases_s.get("parity", 0.0) if isinstance(outcome, Measured) else 0.0


def trial_label(number: int) -> str:
    """How a trial is called: 0 is the reference."""
    return "reference" if number == 0 else f"trial {number}"


def without_label(without: str | None) -> str:
    """How a run of the ablation is called."""
    return "the plan again" if without is None else f"without {without}"


def finalist_label(number: int) -> str:
    """How a finalist's run is called."""
    return "reference again" if number == 0 else f"trial {number} again"
