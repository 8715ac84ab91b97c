"""After the search: the best few are measured once more, and the winner in fresh interpreters, which are reported.

A first round picks the winner, together with its trial, so that it is not picked on the numbers that are reported: the
best of many noisy numbers flatters itself. Then winner and reference take turns, so that a drift of the machine meets
both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..measure import Measurement
from ..workers import Measured, Outcome, TimedOut
from .events import FinalistEnded, TrialStarted
from .pace import LEAST_SHARE_S, NUM_FINALISTS, NUM_REPEATS
from .session import Session
from .study import Tried

__all__ = ["Final", "settle"]


@dataclass(frozen=True)
class Final:
    """What the finalists came to."""

    winner: Tried | None
    """None when nothing fits."""
    repeats: tuple[Measurement, ...]
    """The winner's fresh measurements; empty when there was no time for any."""
    reference: tuple[Measurement, ...]
    """The reference's."""


def settle(session: Session, fell: Callable[[Tried], None]) -> Final:
    """Choose among the feasible configurations and measure the choice for the plan.

    Args:
        session: the search, which has ended.
        fell: is told what did not hold when it was measured again, with that outcome. It is no longer feasible then,
            and others may have been tried; what is feasible now is chosen among anew.

    Returns:
        The winner with its repeats: fewer than three, or none, where ``--max-time`` or an interruption left no more.
    """
    finals = _Finals(session)
    while True:
        try:
            return finals.settle()
        except _Fell as found:
            fell(found.row)


class _OutOfTime(Exception):
    """No time for another run, or the user asked to stop."""


class _Fell(Exception):
    """A configuration did not hold when it was measured again."""

    def __init__(self, row: Tried) -> None:
        self.row = row


@dataclass
class _Finals:
    session: Session
    reference_runs: dict[int, Measurement | None] = field(default_factory=dict)
    """By round; None where it did not run to its end."""
    _num_tried: int = 0
    _outcomes: dict[str, Outcome] = field(default_factory=dict)

    def settle(self) -> Final:
        """Once more from the start, but what was measured is not measured again unless others were tried since."""
        if self._num_tried != len(self.session.study.tried):
            self._num_tried, self.reference_runs = len(self.session.study.tried), {}
        feasible = self.session.feasible
        finalists = self._finalists(feasible)
        compared, num_repeats = self.session.pace.finalist_runs(len(finalists), int(self._repeats_reference()))
        winner = self._fastest(finalists, compared if num_repeats and compared > 1 else 0, num_repeats)
        repeats = self._repeat(winner, num_repeats) if winner else []
        reference = [run for run in self.reference_runs.values() if run is not None]
        if winner and winner.number != 0 and self._reference_is_better(repeats or [_measurement(winner)], reference):
            winner, repeats = self.session.reference, reference
        return Final(winner, tuple(repeats), tuple(repeats if winner is self.session.reference else reference))

    def _finalists(self, feasible: Sequence[Tried]) -> list[Tried]:
        """The fastest few, fastest first. The reference takes turns with the winner anyway."""
        return [row for row in feasible if row.number != 0][:NUM_FINALISTS] or list(feasible)

    def _repeats_reference(self) -> bool:
        reference = self.session.reference
        return reference is not None and isinstance(reference.outcome, Measured)

    def _reference_is_better(self, repeats: Sequence[Measurement], runs: Sequence[Measurement]) -> bool:
        """Whether the reference fits and turned out the faster after all: then nothing is worth a change. Where it was
        not asked for again, its trial speaks for it."""
        reference = self.session.reference
        if reference not in self.session.feasible or (self.reference_runs and not runs):
            return False
        assert reference is not None
        runs = runs or [_measurement(reference)]
        if not all(self.session.budget.holds(run.peak.process) for run in runs):
            return False
        return _mean_speed(runs) > _mean_speed(repeats)

    def _fastest(self, finalists: Sequence[Tried], num_compared: int, num_repeats: int) -> Tried | None:
        """Round 0: the first so many are measured once more, where there is time. By the geometric mean of the speeds
        that are known of each."""
        log_speeds = {row.number: [row.verdict.log_speed or 0.0] for row in finalists}
        known = [row for row in finalists if self._key(row, 0) in self._outcomes]
        compared = finalists[:num_compared] or known
        try:
            for position, row in enumerate(compared):
                num_fresh = num_repeats * (1 + self._repeats_reference())
                again = self._hold(row, 0, self._run(row, 0, num_fresh, len(compared) - position))
                log_speeds[row.number].append(math.log(again.samples_per_s.value))
        except _OutOfTime:
            pass
        return max(finalists, key=lambda row: statistics.fmean(log_speeds[row.number]), default=None)

    def _repeat(self, candidate: Tried, num_repeats: int) -> list[Measurement]:
        """Reporting rounds, the candidate and the reference in turn, as many as there is time for."""
        repeats: list[Measurement] = []
        pairs = 1 + (candidate.number != 0 and self._repeats_reference())
        try:
            for number in range(1, num_repeats + 1):
                runs_left = (num_repeats - number + 1) * pairs
                repeats.append(self._hold(candidate, number, self._run(candidate, number, runs_left)))
                if pairs == 2 and number not in self.reference_runs:
                    self._run_reference(number, runs_left - 1)
        except _OutOfTime:
            pass
        return repeats

    def _run_reference(self, number: int, runs_left: int) -> None:
        reference = self.session.reference
        assert reference is not None
        outcome = self._run(reference, number, runs_left)
        self.reference_runs[number] = outcome.measurement if isinstance(outcome, Measured) else None
        if not isinstance(outcome, Measured):
            self.session.warn(f"the reference did not run again in a fresh interpreter: {self._why(outcome)}")

    def _run(self, row: Tried, number: int, num_fresh: int, num_compared: int = 0) -> Outcome:
        """One run, or what is known of it: from before something else fell, or stored by an earlier driver."""
        session = self.session
        key = self._key(row, number)
        if key in self._outcomes:
            return self._outcomes[key]
        outcome = session.study.evidence(key)
        if outcome is None:
            share_s = session.pace.finalist_share_s(num_compared, num_fresh)
            if share_s is None or session.stop.is_set():
                raise _OutOfTime
            name = f"finalist-{row.number:03d}-round-{number}"
            session.observe(TrialStarted(row.number, row.settings, finalist_round=number))
            outcome = session.executor.ask(session.request(name, row.settings, share_s, number))
            is_late = isinstance(outcome, TimedOut) and session.pace.left_s() < LEAST_SHARE_S
            if is_late or session.was_cut_off(outcome):
                raise _OutOfTime
            session.study.keep_evidence(key, outcome)
            session.learn(name, outcome, fresh=number > 0)
        self._outcomes[key] = outcome
        session.observe(FinalistEnded(row.number, row.settings, number, NUM_REPEATS, outcome))
        return outcome

    def _key(self, row: Tried, number: int) -> str:
        """The study's, for one run."""
        return f"again:{self._num_tried}:{number}:{row.number}"

    def _hold(self, row: Tried, number: int, outcome: Outcome) -> Measurement:
        """The measurement.

        Raises:
            _Fell: the configuration cannot be used after all.
        """
        verdict = self.session.judge(outcome)
        if verdict.feasible and isinstance(outcome, Measured):
            return outcome.measurement
        where = f"in fresh interpreter {number}" if number else "when it was measured again"
        self.session.warn(f"trial {row.number} is out: {verdict.reason}, {where}. The next is tried.")
        raise _Fell(Tried(row.number, row.settings, outcome, verdict))

    def _why(self, outcome: Outcome) -> str:
        return self.session.judge(outcome).reason or outcome.kind


def _measurement(tried: Tried) -> Measurement:
    assert isinstance(tried.outcome, Measured), "it is feasible"
    return tried.outcome.measurement


def _mean_speed(runs: Sequence[Measurement]) -> float:
    return statistics.fmean(run.samples_per_s.value for run in runs)
