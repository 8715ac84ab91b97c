"""What has happened so far in a search, gathered from its events; every display draws this."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ...measure import Measurement
from ...searches.budget import asked
from ...searches.event_base import Event, RunEnded, RunStarted
from ...searches.events import (
    AblationStarted,
    BudgetKnown,
    FinalistEnded,
    PredictionEnded,
    PredictionStarted,
    SearchStarted,
    Stopped,
    TaskRead,
    TrialEnded,
    TrialStarted,
)
from ...searches.options import SearchOptions
from ...searches.predicted.duration import Costs, Runs, likely_s, likely_trials, predictions_s
from ...searches.time_budget import NUM_FINALISTS, NUM_REPEATS
from ...searches.winner.by_turns import NUM_ROUNDS_BY_TURNS, have_room
from ...techniques import Facts, Settings
from ...words import remark
from ...workers import Measured, Outcome

_OF_REFERENCE = ("rounded", "quality")
"""Phases that hardly another trial has."""


@dataclass(frozen=True)
class Running:
    """A run in flight."""

    event: RunStarted
    since: float
    """The clock when it started, seconds."""


class Progress:
    """Consumes events in order; holds no text."""

    def __init__(self, options: SearchOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self.budget = asked(options)
        self.facts: Facts | None = None
        self.started: SearchStarted | None = None
        self.reference: Measurement | None = None
        self.best: tuple[Settings, Measurement] | None = None
        self.ended: list[RunEnded] = []
        self.num_trials_ended = 0
        self.finalist_round: tuple[int, int | None] | None = None
        self.stopped: str | None = None
        self.predicting: int | None = None
        """Configurations whose memory is being predicted; None before and after."""
        self._clock = clock
        self._began = self._phase_began = clock()
        self._trials: list[TrialEnded] = []
        self._again: list[FinalistEnded] = []
        """Of the finalists that count: since one fell, others may have been tried."""
        self._rounds_s: list[float] = []
        """Seconds of rounds by turns."""
        self._predictions_s = 0.0
        """Of those that are still to be made."""
        self._fallen: set[int] = set()
        self._running: dict[Hashable, Running] = {}

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
        if costs is None or self.is_unsure or any(isinstance(each.event, AblationStarted) for each in self.running):
            return None
        left = likely_s(self._runs_left(), costs, max(len(self._running), 1))
        longest_s = max(costs.trial_s, costs.fresh_s, costs.round_s * any(each.event.by_turns for each in self.running))
        left += max(self._predictions_s - (self.phase_s or 0.0), 0.0)
        left -= sum(min(self.running_s(each), longest_s) for each in self.running) / max(len(self._running), 1)
        if self.options.max_time is not None:
            left = min(left, self.options.max_time - self.elapsed_s)
        return max(left, 0.0)

    @property
    def is_unsure(self) -> bool:
        """Whether the planned rounds of finalists were too few, and another runs."""
        rounds = [each.event for each in self.running if isinstance(each.event, TrialStarted)]
        return any((one.finalist_round or 0) > (NUM_ROUNDS_BY_TURNS if one.by_turns else NUM_REPEATS) for one in rounds)

    @property
    def by_turns(self) -> bool:
        """Whether the best and the reference take turns, or likely will: where there is memory for both. What changes
        the function is judged as well, in rounds of its own."""
        if self._rounds_s or any(each.event.by_turns for each in self.running):
            return True
        is_trained = self.options.max_quality_drop is not None and not self.options.inference
        in_turn = any(each.round > 0 for each in self._again) or is_trained
        if in_turn or self.reference is None or self.facts is None:
            return False
        best = self.best[1] if self.best else self.reference
        return have_room((self.reference.peak, best.peak), self.facts)

    @property
    def likely_trials(self) -> int:
        """Trials that are likely to come."""
        if self.stopped is not None or self.finalist_round is not None:
            return 0
        likely = likely_trials(self.num_trials, self.options.sampler, self.num_trials_ended)
        return max(likely, len(self._running))

    @property
    def trial_s(self) -> float | None:
        """About what a trial takes, seconds; None before one has ended."""
        costs = self._costs()
        return None if costs is None else costs.trial_s

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
        if isinstance(event, RunStarted):
            self._running[event.run] = Running(event, self._clock())
        if isinstance(event, RunEnded):
            self._ended(event)
        match event:
            case TaskRead(facts, seconds):
                self.facts = facts
                self._predictions_s = predictions_s(seconds, self.options)
            case SearchStarted():
                self.started = event
                for earlier in event.resumed:
                    self._ended(earlier)
            case TrialStarted(number, _, finalist_round):
                self._predictions_s = 0.0 if number else self._predictions_s
                if finalist_round is None:
                    self.stopped = self.finalist_round = None  # a finalist fell, and the search goes on
                    self._again.clear()
                    self._rounds_s.clear()
            case AblationStarted():
                self.finalist_round = None
            case BudgetKnown(budget):
                self.budget = budget
            case Stopped(reason):
                self.stopped = reason
            case PredictionStarted(num_configurations):
                self.predicting = num_configurations
                self._phase_began = self._clock()
            case PredictionEnded():
                self.predicting = None
                self._predictions_s = 0.0

    def _costs(self) -> Costs | None:
        """What runs have taken so far; None before one has ended."""
        if not self._trials:
            return None
        own = [(each.outcome, each.outcome.seconds - _phases_s(each.outcome, *_OF_REFERENCE)) for each in self._trials]
        trial_s = statistics.median(seconds for _, seconds in own)
        again_s = statistics.median(seconds - _phases_s(outcome, "parity") for outcome, seconds in own)
        timed_s = statistics.median(_phases_s(outcome, "timed") for outcome, _ in own)
        costs = Costs.of(trial_s, again_s, timed_s, self.options.trial_time)
        fresh = [each.outcome.seconds for each in self._again if each.round > 0]
        return dataclasses.replace(
            costs,
            fresh_s=statistics.median(fresh) if fresh else costs.fresh_s,
            round_s=statistics.median(self._rounds_s) if self._rounds_s else costs.round_s,
        )

    def _runs_left(self) -> Runs:
        trials = self.likely_trials
        candidates = sum(each.number > 0 for each in self._usable()) + max(trials - 1, 0)
        firsts = [each for each in self._again if each.round == 0]
        fresh = [each for each in self._again if each.round > 0]
        compared = min(NUM_FINALISTS, candidates) if candidates > 1 and not fresh else 0
        is_reference = bool(fresh) and fresh[0].number == 0
        if self.by_turns and candidates and not is_reference:
            rounds = max(NUM_ROUNDS_BY_TURNS - len(self._rounds_s), 0)
            return Runs(trials, max(compared - len(firsts), 0), rounds=rounds)
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

    def _ended(self, event: RunEnded) -> None:
        ran = self._running.pop(event.run, None)
        self.ended += [event] if event.is_shown else []
        match event:
            case TrialEnded():
                self.num_trials_ended += 1
                self._trials.append(event)
                if isinstance(event.outcome, Measured):
                    if event.number == 0:
                        self.reference = event.outcome.measurement
                    if event.is_best:
                        self.best = (event.settings, event.outcome.measurement)
            case FinalistEnded():
                self._rounds_s += [self.running_s(ran)] if ran is not None and ran.event.by_turns else []
                self.finalist_round = (event.round, event.num_rounds)
                self._again.append(event)
                if event.number and remark(event.outcome, self.budget) is not None:
                    self._fell(event.number)


def _phases_s(outcome: Outcome, *names: str) -> float:
    """Seconds of these phases of a trial."""
    found = outcome.measurement.phases_s if isinstance(outcome, Measured) else {}
    return sum(found.get(name, 0.0) for name in names)
