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
from ..workers import Measured, Outcome
from .events import FinalistEnded, TrialStarted
from .pace import NUM_FINALISTS, NUM_REPEATS
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
    reference_runs: list[Measurement] = field(default_factory=list)
    _num_tried: int = 0
    _outcomes: dict[str, Outcome] = field(default_factory=dict)

    def settle(self) -> Final:
        """Once more from the start, but what was measured is not measured again unless others were tried since."""
        if self._num_tried != len(self.session.study.tried):
            self._num_tried, self.reference_runs = len(self.session.study.tried), []
        feasible = self.session.feasible
        finalists = self._finalists(feasible)
        compared, num_repeats = self.session.pace.finalist_runs(len(finalists), int(self._repeats_reference()))
        order = finalists[:compared] if num_repeats else []
        if len(order) > 1:
            order = self._compare(order, num_repeats)
        winner = next(iter(order or feasible), None)
        if winner is None:
            return Final(None, (), tuple(self.reference_runs))
        repeats = self._repeat(winner, num_repeats)
        if winner.number != 0 and self._reference_is_better(repeats or [_measurement(winner)]):
            winner, repeats = self.session.reference, self.reference_runs
        reference = repeats if winner is self.session.reference else self.reference_runs
        return Final(winner, tuple(repeats), tuple(reference))

    def _finalists(self, feasible: Sequence[Tried]) -> list[Tried]:
        """The fastest few, fastest first. The reference takes turns with the winner anyway."""
        return [row for row in feasible if row.number != 0][:NUM_FINALISTS] or list(feasible)

    def _repeats_reference(self) -> bool:
        reference = self.session.reference
        return reference is not None and isinstance(reference.outcome, Measured)

    def _reference_is_better(self, repeats: Sequence[Measurement]) -> bool:
        """Whether the reference fits and turned out the faster after all: then nothing is worth a change. Where it was
        not measured again, its trial speaks for it."""
        reference = self.session.reference
        if reference not in self.session.feasible:
            return False
        assert reference is not None
        runs = self.reference_runs or [_measurement(reference)]
        if not all(self.session.budget.holds(run.peak.process) for run in runs):
            return False
        return _mean_speed(runs) > _mean_speed(repeats)

    def _compare(self, finalists: Sequence[Tried], num_repeats: int) -> list[Tried]:
        """Round 0: each once, by the geometric mean with its trial, fastest first. Nothing where there was no time for
        all."""
        log_speeds: dict[int, float] = {}
        try:
            for position, row in enumerate(finalists):
                num_fresh = num_repeats * (1 + self._repeats_reference())
                again = self._hold(row, 0, self._run(row, 0, num_fresh, len(finalists) - position))
                log_speeds[row.number] = math.log(again.samples_per_s.value) + (row.verdict.log_speed or 0.0)
        except _OutOfTime:
            return []
        return sorted(finalists, key=lambda row: -log_speeds[row.number])

    def _repeat(self, candidate: Tried, num_repeats: int) -> list[Measurement]:
        """Reporting rounds, the candidate and the reference in turn, as many as there is time for."""
        repeats: list[Measurement] = []
        pairs = 1 + (candidate.number != 0 and self._repeats_reference())
        try:
            for number in range(1, num_repeats + 1):
                runs_left = (num_repeats - number + 1) * pairs
                repeats.append(self._hold(candidate, number, self._run(candidate, number, runs_left)))
                if pairs == 2 and len(self.reference_runs) < number:
                    self._run_reference(number, runs_left - 1)
        except _OutOfTime:
            pass
        return repeats

    def _run_reference(self, number: int, runs_left: int) -> None:
        reference = self.session.reference
        assert reference is not None
        outcome = self._run(reference, number, runs_left)
        if isinstance(outcome, Measured):
            self.reference_runs.append(outcome.measurement)
        else:
            self.session.warn(f"the reference did not run again in a fresh interpreter: {self._why(outcome)}")

    def _run(self, row: Tried, number: int, num_fresh: int, num_compared: int = 0) -> Outcome:
        """One run, or what is known of it: from before something else fell, or stored by an earlier driver."""
        session = self.session
        key = f"again:{self._num_tried}:{number}:{row.number}"
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
            if session.was_cut_off(outcome):
                raise _OutOfTime
            session.study.keep_evidence(key, outcome)
            session.learn(name, outcome, fresh=number > 0)
        self._outcomes[key] = outcome
        session.observe(FinalistEnded(row.number, row.settings, number, NUM_REPEATS, outcome))
        return outcome

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
