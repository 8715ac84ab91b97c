"""After the search: rivals for the first place are measured once more, then the winner in fresh interpreters.

The first round picks the winner, with its trial. Its figures are not reported: the best of many noisy numbers looks
better than it is. Then winner and reference take turns until the plan's figures are sure; disturbed rounds run again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ...measure import Measurement
from ...workers import Compared, CompareRequest, Dropped, Measured, MeasureRequest, Outcome
from ..events import FinalistEnded, TrialStarted
from ..runs import run_once
from ..sampler.loaders import Loaders
from ..session import Pairs, Session
from ..store.pace import weighed
from ..store.tried import Tried
from ..time_budget import MOST_ROUNDS
from ..verdict import why_not
from .by_turns import MOST_ROUNDS_BY_TURNS, NUM_ROUNDS_BY_TURNS, can_take_turns, comparing
from .evaluation import find_batch, with_batch
from .evidence import Pair, are_sure, interval, undisturbed
from .final import Final, qualities, run_name
from .proof import Judgement, look
from .proven import prove
from .rivals import finalists_of, in_order, rivals_of

_BESIDE, _BY_TURNS, _ANEW, _COMPARED, _QUALITY = ":reference", ":turns", ":anew", ":compared", "quality"
"""Parts of keys: of the reference's run right after one, of both by turns, of a round that is begun again, of one that
compares losses, and of the reference's quality from a round's seed."""


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
    """A configuration cannot be used, as its repeated measurement shows."""

    def __init__(self, row: Tried) -> None:
        self.row = row


@dataclass
class _Finals:
    session: Session
    _num_tried: int = 0
    _evaluation_batch: int | None = None
    """Of the winner; None is that of its trial."""
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _proven: Pairs = ()
    """Qualities of the candidate and of the reference, where one process judged both; none where rounds do."""
    _reference_failed: bool = False
    """Whether the reference did not run again beside the candidate that is measured."""

    def settle(self) -> Final:
        """Choose and measure once more from the start. What was measured is not measured again unless other trials ran
        since."""
        self._num_tried = len(self.session.study.tried)
        finalists = finalists_of(self.session)
        rivals = rivals_of(self.session, finalists)
        compared, num_rounds = self.session.time_budget.finalist_runs(len(rivals), int(self._repeats_reference()))
        winner = self._fastest(finalists, rivals if num_rounds and compared > 1 else (), num_rounds)
        if winner is None:
            return Final(None)
        rounds = self._repeat_evaluating(winner, num_rounds)
        if winner.number != 0 and self._reference_is_better(winner, rounds):
            own = [Pair(pair.reference) for pair in rounds if pair.reference is not None]
            return Final(self.session.reference, tuple(own))
        return Final(winner, tuple(rounds), tuple(self._proven))

    def _repeats_reference(self) -> bool:
        reference = self.session.reference
        return reference is not None and isinstance(reference.outcome, Measured)

    def _reference_is_better(self, winner: Tried, rounds: Sequence[Pair]) -> bool:
        """Whether the reference fits and is the faster after all, so that the plan is the job as it stands. Where it
        was not measured again, its trial counts."""
        reference = self.session.reference
        runs = [pair.reference for pair in rounds if pair.reference is not None]
        if reference not in self.session.feasible or (self._reference_failed and not runs):
            return False
        assert reference is not None
        budget = self.session.budget
        if any(budget.of_job(run.peak.process).over(run.peak) for run in runs):
            return False
        if any(run.latency is not None and run.latency.exceeds(budget) for run in runs):
            return False
        ratios = [ratio for pair in undisturbed(rounds) if (ratio := pair.log_ratio) is not None]
        if ratios:
            found, known = interval(ratios), self.session.facts
            has_more = winner.settings.num_loading(known) > reference.settings.num_loading(known)
            is_alike = winner.settings.stock("loader") == reference.settings.stock("loader")
            return (found.low if has_more and is_alike else found.value) < 0
        repeated = [pair.winner.samples_per_s.value for pair in rounds]
        if repeated:
            return _speed(reference) > statistics.fmean(repeated)
        study = self.session.study
        return not study.paces.of(winner.number).is_sure or study.log_speed(reference) > study.log_speed(winner)

    def _fastest(self, finalists: Sequence[Tried], rivals: Sequence[Tried], num_rounds: int) -> Tried | None:
        """Round 0: measure rivals once more, or take stored runs. The fastest is the one with the largest geometric
        mean of its speeds, as they compare. What other work disturbed too much is not by its trial alone."""
        study = self.session.study
        log_speeds = {row.number: [(study.log_speed(row), study.paces.of(row.number).error)] for row in finalists}
        sure = {row.number for row in finalists if study.paces.of(row.number).is_sure}
        compared = rivals or [row for row in finalists if self._first_key(row) in self._outcomes]
        num_fresh = num_rounds * (1 + self._repeats_reference())
        try:
            for position, row in enumerate(compared):
                again = self._hold(row, 0, self._run_first(row, num_fresh, len(compared) - position))
                now = study.paces.now(again.disturbed)
                log_speeds[row.number].append((math.log(again.samples_per_s.value) + now.shift, now.error))
                sure |= {row.number} if now.is_sure else set()
        except _OutOfTime:
            pass
        able = [row for row in finalists if row.number in sure] or finalists
        ranked = in_order(self.session, able, lambda row: weighed(log_speeds[row.number]))
        fewest = [Loaders(study).fewest(row) for row in ranked[:1]]  # more workers that gain nothing are not taken
        return self._with_losses([*fewest, *(row for row in ranked if row not in fewest)], num_fresh)

    def _with_losses(self, ranked: Sequence[Tried], num_fresh: int) -> Tried | None:
        """The first whose losses were compared: they are, where its trial was surely slower than what has fallen since;
        where there is no time for it, the next. What is slower than the job as it stands is not worth that."""
        session, reference = self.session, self.session.reference
        for row in ranked:
            if not session.lacks_comparison(row):
                return row
            if reference in session.feasible and session.study.log_speed(reference) > session.study.log_speed(row):
                return reference
            with suppress(_OutOfTime):
                outcome = self._run_first(row, num_fresh, 1)
                self._hold(row, 0, outcome)
                return replace(row, outcome=outcome, verdict=self.session.judge(outcome))
        return next((row for row in self.session.feasible if not self.session.lacks_comparison(row)), None)

    def _run_first(self, row: Tried, num_fresh: int, num_compared: int) -> Outcome:
        """Round 0, in which losses are compared that its trial did not come to."""
        compares = self.session.lacks_comparison(row)
        return self._run(row, 0, self._first_key(row), num_fresh, num_compared=num_compared, compares=compares)

    def _first_key(self, row: Tried) -> str:
        return self._key(row, 0, False) + (_COMPARED if self.session.lacks_comparison(row) else "")

    def _repeat_evaluating(self, winner: Tried, num_rounds: int) -> list[Pair]:
        """The reported rounds, with the evaluation batch that is found for the winner; with half of it, where that is
        over the budget after all."""
        share_s = self.session.time_budget.finalist_share_s(0, num_rounds * (1 + self._repeats_reference()) + 1)
        self._evaluation_batch = find_batch(self.session, winner, share_s if winner.number and num_rounds else None)
        while True:
            try:
                return self._repeat(winner, num_rounds)
            except _Fell as fell:
                least = self.session.requests.evaluation_batch(winner.settings)
                if self._evaluation_batch is None or not fell.row.verdict.over_memory:
                    raise
                over, half = self._evaluation_batch, self._evaluation_batch // 2
                self._evaluation_batch = half if least is not None and half > least else None
                self.session.warn(f"batches of {over} are over the budget in evaluation after all: half is tried.")

    def _repeat(self, candidate: Tried, num_planned: int) -> list[Pair]:
        """The reported rounds: candidate and reference by turns, or in turn, until the figures are sure or the time is
        up."""
        rounds: list[Pair] = []
        self._reference_failed = False
        is_paired = candidate.number != 0 and self._repeats_reference()
        changes = candidate.settings.affect("function")
        self._proven = prove(self.session, candidate, self._is_unknown) if changes else ()
        if self._proven:
            self._hold_quality(candidate, ())
        judged = changes and not self._proven
        budget = self.session.budget_of(candidate.number)
        by_turns = is_paired and not judged and can_take_turns(self.session, candidate)
        if by_turns:
            num_planned = min(num_planned, NUM_ROUNDS_BY_TURNS)
        try:
            while num_planned and len(rounds) < (MOST_ROUNDS_BY_TURNS if by_turns else MOST_ROUNDS):
                if are_sure(rounds, budget) and not (judged and self._judgement(rounds) == "unknown"):
                    break
                number = len(rounds) + 1
                runs_left = max(num_planned - number + 1, 1) * (1 + is_paired)
                if by_turns:
                    rounds.append(self._take_turns(candidate, number, runs_left))
                else:
                    self._run_in_turn(candidate, rounds, runs_left, is_paired, judged)
                if judged and self._judgement(rounds) in ("dropped", "futile"):
                    break
        except _OutOfTime:
            pass
        if judged:
            self._hold_quality(candidate, rounds)
        return rounds

    def _take_turns(self, candidate: Tried, number: int, runs_left: int) -> Pair:
        """A round in which both live at once."""
        session, reference = self.session, self.session.reference
        assert reference is not None

        def make() -> CompareRequest | None:
            share_s = session.time_budget.finalist_share_s(0, runs_left)
            if share_s is None:
                return None
            one, other = (
                session.request(run_name(row, number), row.applied, share_s, number) for row in (candidate, reference)
            )
            one = with_batch(session, one, self._evaluation_batch)
            return comparing(one, other, share_s, session.time_budget.turns_s(runs_left))

        key = self._key(candidate, number, False) + _BY_TURNS
        started = TrialStarted(candidate.number, candidate.settings, finalist_round=number, by_turns=True)
        outcome = run_once(session, key, make, started)
        if outcome is None:
            raise _OutOfTime
        if not isinstance(outcome, Compared):  # what runs both failed
            self._hold(candidate, number, outcome)
        assert isinstance(outcome, Compared), "it would have fallen"
        session.observe(FinalistEnded(candidate.number, candidate.settings, number, outcome.one))
        if outcome.other is not None:
            session.observe(FinalistEnded(reference.number, reference.settings, number, outcome.other))
        found = self._hold(candidate, number, outcome.one)
        if not isinstance(outcome.other, Measured):
            self._tell_of_reference(outcome.other)
            return Pair(found)
        return Pair(found, outcome.other.measurement, outcome.turns if len(outcome.turns) > 1 else ())

    def _run_in_turn(self, candidate: Tried, rounds: list[Pair], runs_left: int, is_paired: bool, judged: bool) -> None:
        """A round in which the reference runs right after the candidate; the candidate's half stands if the time is up
        meanwhile."""
        number = len(rounds) + 1
        key = self._key(candidate, number, judged)
        while is_paired and self._is_half(key):
            key += _ANEW
        outcome = self._run(candidate, number, key, runs_left, judged)
        found = self._hold(candidate, number, outcome)
        rounds.append(Pair(found))
        if is_paired:
            rounds[-1] = Pair(found, self._run_reference(number, key + _BESIDE, runs_left - 1, judged))

    def _judgement(self, rounds: Sequence[Pair]) -> Judgement:
        drop, found = self.session.options.max_quality_drop, self._proven or qualities(rounds)
        return look(found, drop) if found and drop is not None else "unknown"

    def _is_unknown(self, pairs: Pairs) -> bool:
        drop = self.session.options.max_quality_drop
        return drop is not None and look(pairs, drop) == "unknown"

    def _hold_quality(self, candidate: Tried, rounds: Sequence[Pair]) -> None:
        """Demand proof that a winner which changes what the model computes is within the allowed drop.

        Raises:
            _Fell: it is not proven.
        """
        judgement, drop = self._judgement(rounds), self.session.options.max_quality_drop
        if judgement == "kept":
            return
        found = self._proven or qualities(rounds)
        said = why_not(found, drop) if found and drop is not None else "its quality was not compared"
        outcome = Dropped(message=said)
        self.session.warn(f"trial {candidate.number} is out: {said}. The next is tried.")
        raise _Fell(Tried(candidate.number, candidate.settings, outcome, self.session.judge(outcome)))

    def _run_reference(self, number: int, key: str, runs_left: int, judged: bool) -> Measurement | None:
        """The reference's measurement right after the candidate's; None, with a warning, if the run failed. Its quality
        from one seed is the same beside whatever candidate, and is measured once."""
        reference, study = self.session.reference, self.session.study
        assert reference is not None
        known = study.evidence(f"{_QUALITY}:{number}") if judged else None
        outcome = self._run(reference, number, key, runs_left, judged and known is None)
        if not isinstance(outcome, Measured):
            self._tell_of_reference(outcome)
            return None
        if judged and known is None:
            study.keep_evidence(f"{_QUALITY}:{number}", outcome)
        quality = known.measurement.quality if isinstance(known, Measured) else outcome.measurement.quality
        return outcome.measurement.model_copy(update={"quality": quality})

    def _tell_of_reference(self, outcome: Outcome | None) -> None:
        self._reference_failed = True
        why = "it was not started" if outcome is None else self._why(outcome)
        self.session.warn(f"the reference did not run again in a fresh interpreter: {why}")

    def _run(
        self,
        row: Tried,
        number: int,
        key: str,
        num_fresh: int,
        judged: bool = False,
        num_compared: int = 0,
        compares: bool = False,
    ) -> Outcome:
        """One run; taken from earlier rounds or an earlier process if it is known."""
        if key in self._outcomes:
            return self._outcomes[key]
        session = self.session
        if session.known is not None and not judged and session.study.evidence(key) is None:
            known = session.known.again(session, row.settings, number)
            if known is not None:
                session.study.keep_evidence(key, known)

        def make() -> MeasureRequest | None:
            share_s = session.time_budget.finalist_share_s(num_compared, num_fresh)
            if share_s is None:
                return None
            request = session.request(run_name(row, number), row.applied, share_s, number, judged, compares)
            return with_batch(session, request, self._evaluation_batch if number and row.number else None)

        outcome = run_once(session, key, make, TrialStarted(row.number, row.settings, finalist_round=number))
        if outcome is None:
            raise _OutOfTime
        self._outcomes[key] = outcome
        session.observe(FinalistEnded(row.number, row.settings, number, outcome))
        return outcome

    def _key(self, row: Tried, number: int, judged: bool) -> str:
        """The key under which the study stores one run."""
        key = f"again:{self._num_tried}:{number}:{row.number}" + (":judged" if judged else "")
        return f"{key}:evaluation-{self._evaluation_batch}" if number and row.number and self._evaluation_batch else key

    def _is_half(self, key: str) -> bool:
        """Whether an earlier process measured the candidate of a round, and ended before its reference: what is
        measured now is no neighbour of it."""
        evidence = self.session.study.evidence
        return evidence(key) is not None and evidence(key + _BESIDE) is None

    def _hold(self, row: Tried, number: int, outcome: Outcome) -> Measurement:
        """The measurement of an outcome that can be used.

        Raises:
            _Fell: the configuration cannot be used after all.
        """
        verdict = self.session.judge(outcome, is_reference=row.number == 0)
        if verdict.feasible and isinstance(outcome, Measured):
            return outcome.measurement
        where = f"in fresh interpreter {number}" if number else "when it was measured again"
        if not (number and self._evaluation_batch and verdict.over_memory):  # else a smaller batch is tried
            self.session.warn(f"trial {row.number} is out: {verdict.reason}, {where}. The next is tried.")
        raise _Fell(Tried(row.number, row.settings, outcome, verdict))

    def _why(self, outcome: Outcome) -> str:
        return self.session.judge(outcome).reason or outcome.kind


def _speed(tried: Tried) -> float:
    return math.exp(tried.verdict.log_speed or 0.0)
