"""Divides ``--max-time`` between trials and finalists."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..workers import Compared, Measured, Outcome

NUM_FINALISTS = 3
"""Most configurations that are measured again, besides the reference."""
NUM_REPEATS = 3
"""Runs in fresh interpreters that are planned for."""
MOST_ROUNDS = 6
"""Most runs in fresh interpreters, if fewer leave the figures unsure."""

LEAST_SHARE_S = 1.0
"""Shortest timed windows of a trial, seconds: shorter ones say little."""
_FINALISTS_PART = 1 / 3
"""Largest part of ``--max-time`` that is reserved for finalists."""
_LATER_PART = 0.5
"""Largest part of ``--max-time`` that predictions and finalists take, in what a search says that it needs."""
_GUESSED_OVERHEAD_S = 2.0
"""Seconds of a trial outside its timed windows, until one was measured."""
FRESH_EXTRA_S = 3.0
"""Seconds that a fresh interpreter adds to a run (importing torch), until one was measured."""
_LOAD_LIMIT_S = 600.0
"""Seconds outside the timed windows that the first trial may take."""
_LEAST_LIMIT_S = 60.0
_SLOWER_BY = 10.0
"""A trial counts as hanging from this many times the reference's overhead on."""
_READS = 2.0
"""A process that predicts has so many times what it took to read the task: in that, one can be traced too."""


@dataclass
class TimeBudget:
    """The time that is left, and the share of the next trial. Learns what trials take outside their timed windows."""

    trial_time_s: float
    """``--trial-time``."""
    max_time_s: float | None
    """``--max-time``."""
    clock: Callable[[], float] = time.monotonic
    """Seconds since some moment."""
    read_s: float = 0.0
    """Seconds that a process took to read the task and look at it once; 0 until one did."""
    started: float = field(init=False)
    _overheads_s: list[float] = field(default_factory=list, init=False)
    _fresh_overheads_s: list[float] = field(default_factory=list, init=False)
    _judged_s: float = field(default=0.0, init=False)
    """Training and evaluation by which the reference's quality was judged."""

    def __post_init__(self) -> None:
        """Time runs from here."""
        self.started = self.clock()

    def elapsed_s(self) -> float:
        """Seconds since the search was asked for."""
        return self.clock() - self.started

    def left_s(self) -> float:
        """Seconds of ``--max-time`` that are left; infinite without it."""
        return math.inf if self.max_time_s is None else self.max_time_s - self.elapsed_s()

    def learn(self, outcome: Outcome, fresh: bool) -> None:
        """Take in a trial's duration, or that of two that took turns."""
        if isinstance(outcome, Compared):
            sides = [side.measurement for side in (outcome.one, outcome.other) if isinstance(side, Measured)]
            timed_s = sum(side.phases_s.get("timed", 0.0) for side in sides)
            self._fresh_overheads_s += [max(0.0, outcome.seconds - timed_s) / 2] if len(sides) == 2 else []
        if isinstance(outcome, Measured):
            overhead = max(0.0, outcome.seconds - outcome.measurement.phases_s.get("timed", 0.0))
            if not self._overheads_s and outcome.measurement.quality is not None:  # most others are not judged
                self._judged_s = outcome.measurement.quality.seconds
                overhead = max(0.0, overhead - self._judged_s)
            (self._fresh_overheads_s if fresh else self._overheads_s).append(overhead)

    def trial_share_s(self, trials_left: int) -> float | None:
        """Seconds of timed windows for the next of ``trials_left`` trials; None where only the finalists' reserve is
        left."""
        if self.max_time_s is None:
            return self.trial_time_s
        left = self.left_s() - self._reserve_s()
        if left < self._overhead_s() + LEAST_SHARE_S:
            return None
        return self._share(left / trials_left - self._overhead_s())

    def may_judge(self) -> bool:
        """Whether there is time for a trial whose quality is judged, too."""
        return self.left_s() - self._reserve_s() >= self._overhead_s() + self._judged_s + LEAST_SHARE_S

    def least_s(self) -> float:
        """The least ``--max-time`` with room for one more trial, by the durations known so far."""
        spent_s = self.elapsed_s() + self._overhead_s() + LEAST_SHARE_S
        return min(spent_s / (1 - _LATER_PART), spent_s + self._finalists_s())

    def most_trials(self) -> int:
        """How many more trials there is time for, one after the other."""
        if self.max_time_s is None:
            return sys.maxsize
        return max(1, int((self.left_s() - self._reserve_s()) / (self._overhead_s() + LEAST_SHARE_S)))

    def deadline_s(self, share_s: float, spare_finalists: bool) -> float:
        """Seconds after which a trial counts as hanging: well above the reference's, within the time that is left."""
        first_s = max(self._overheads_s[:1] + self._fresh_overheads_s[:1], default=0.0) + self._judged_s
        known = max(_LEAST_LIMIT_S, _SLOWER_BY * first_s)
        limit = share_s + (known if self._overheads_s else _LOAD_LIMIT_S)
        return max(LEAST_SHARE_S, min(limit, self.room_s(spare_finalists)))

    def room_s(self, spare_finalists: bool) -> float:
        """Seconds of ``--max-time`` that a trial may take at most, however long it compiles."""
        return self.left_s() - (self._reserve_s() if spare_finalists else 0.0)

    def may_predict(self) -> bool:
        """Whether a process can read the task, predict, and leave time for a trial."""
        left_s = self.left_s() - self._reserve_s()
        return left_s >= _READS * self.read_s + self._overhead_s() + LEAST_SHARE_S

    def prediction_deadline_s(self, most_s: float) -> float:
        """Seconds after which a process that predicts for ``most_s`` counts as hanging: it reads the task first, and
        leaves time for a trial."""
        room_s = self.left_s() - self._reserve_s() - self._overhead_s() - LEAST_SHARE_S
        deadline_s = self.deadline_s(most_s + _READS * self.read_s, spare_finalists=True)
        return max(LEAST_SHARE_S, min(deadline_s, room_s))

    def finalist_runs(self, num_candidates: int, num_references: int) -> tuple[int, int]:
        """How many candidates the first round compares (1: no round is needed), and how many repeats are reported.

        ``(1, 0)`` where there is no time to repeat anything.
        """
        pairs = 1 + num_references
        for compared, repeats in ((num_candidates, NUM_REPEATS), *((1, repeats) for repeats in (NUM_REPEATS, 2, 1))):
            if self._runs_s(compared if compared > 1 else 0, repeats * pairs, LEAST_SHARE_S) <= self.left_s():
                return compared, repeats
        return 1, 0

    def finalist_share_s(self, num_compared: int, num_fresh: int) -> float | None:
        """Seconds of timed windows for the next of the runs that are left; None where there is no time for it.

        Args:
            num_compared: those left of the first round, which run as trials do; the next is one of them if there are.
            num_fresh: those left in fresh interpreters.
        """
        if self.max_time_s is None:
            return self.trial_time_s
        if self.left_s() < self._runs_s(min(num_compared, 1), 0 if num_compared else 1, 0.0):
            return None
        return self._share((self.left_s() - self._runs_s(num_compared, num_fresh, 0.0)) / (num_compared + num_fresh))

    def turns_s(self, num_fresh: int) -> float:
        """Seconds that two fresh runs may take turns for, of ``num_fresh`` that are left: those that lie beside what
        all of them take to start."""
        if self.max_time_s is None:
            return math.inf
        return max(2 * LEAST_SHARE_S, 2 * (self.left_s() - self._runs_s(0, num_fresh, 0.0)) / num_fresh)

    def _reserve_s(self) -> float:
        if self.max_time_s is None:
            return 0.0
        return min(_FINALISTS_PART * self.max_time_s, self._finalists_s())

    def _finalists_s(self) -> float:
        return self._runs_s(NUM_FINALISTS, 2 * NUM_REPEATS, self.trial_time_s)

    def _runs_s(self, num_compared: int, num_fresh: int, share_s: float) -> float:
        """Wall time of ``num_compared`` forked and ``num_fresh`` fresh runs, each with ``share_s`` of timed windows."""
        compared_s, fresh_s = self._overhead_s() + share_s, self._fresh_overhead_s() + share_s
        return num_compared * compared_s + num_fresh * fresh_s

    def _share(self, seconds: float) -> float:
        return max(LEAST_SHARE_S, min(self.trial_time_s, seconds))

    def _overhead_s(self) -> float:
        return statistics.fmean(self._overheads_s) if self._overheads_s else _GUESSED_OVERHEAD_S

    def _fresh_overhead_s(self) -> float:
        return max(self._fresh_overheads_s, default=self._overhead_s() + FRESH_EXTRA_S)
