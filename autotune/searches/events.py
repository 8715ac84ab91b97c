"""Events of a running search. Frozen data: the command line draws them, tests assert on them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from ..plan import Budget
from ..techniques import Facts, Settings
from ..units import format_duration, size
from ..words import (
    count,
    facts_words,
    finalist_label,
    outcome_words,
    over_reference,
    round_words,
    settings_words,
    trial_label,
)
from ..workers import Measured, Outcome
from .budget import budget_words
from .event_base import Event, Known, Run, RunEnded, RunStarted, outcome_row
from .seconds import Spent, total_s
from .time_budget import MOST_ROUNDS, NUM_REPEATS

INTERRUPTED = "interrupted"
"""``Stopped.reason``, and ``Plan.search.stopped``, after the user's Ctrl-C."""


@dataclass(frozen=True)
class TaskRead(Event, kind="inspected"):
    """The task loaded, and this is what is known of it."""

    facts: Facts
    seconds: float = 0.0
    """What that took."""

    def words(self, known: Known) -> str:
        return f"task: {facts_words(self.facts)}"

    def row(self, known: Known) -> dict[str, Any]:
        return {"words": facts_words(self.facts)}


@dataclass(frozen=True)
class Warned(Event, kind="warned"):
    """A message that the user must see, such as a request that could not be met."""

    message: str

    def words(self, known: Known) -> str:
        return f"note: {self.message}"

    def row(self, known: Known) -> dict[str, Any]:
        return {"words": self.message}


@dataclass(frozen=True)
class TrialStarted(RunStarted, kind="trial_started"):
    """A trial process is about to run. Number 0 is the reference; finalists carry their round."""

    number: int
    settings: Settings
    finalist_round: int | None = None
    by_turns: bool = False
    promise: float | None = None
    """Expected gain in the logarithm of the speed, for each second of the trial; None where it is not known."""

    @property
    def run(self) -> Hashable:
        return self.number, self.finalist_round

    @property
    def label(self) -> str:
        return trial_label(self.number) if self.finalist_round is None else finalist_label(self.number)

    def words(self, known: Known) -> str:
        return f"{self.label}{self._how()}: {settings_words(self.settings, known.facts)}"

    def _how(self) -> str:
        number = self.finalist_round
        if number is None:
            return f"{'' if self.number else ' (the job as it stands)'} starts"
        if self.by_turns:
            return f" and the reference by turns, {round_words(number)}, start in fresh processes"
        fresh = " in a fresh process" if number else ""
        fresh += ", since those before leave it unsure" if number > NUM_REPEATS else ""
        return f", {round_words(number)}, starts{fresh}"

    def row(self, known: Known) -> dict[str, Any]:
        words = settings_words(self.settings, known.facts)
        return {"number": self.number, "round": self.finalist_round, "settings": words}


@dataclass(frozen=True)
class TrialEnded(RunEnded, kind="trial_ended"):
    """A trial's outcome is known and stored."""

    number: int
    settings: Settings
    outcome: Outcome
    feasible: bool
    """Whether it fits the budget, keeps parity and does not leak."""
    is_best: bool
    """Whether it is the fastest feasible trial so far."""
    is_known: bool = False
    """Whether another search measured it, so that it cost nothing here."""
    is_sure: bool = True
    """Whether its speed may decide by itself: other work did not take too much of its time."""

    @property
    def run(self) -> Hashable:
        return self.number, None

    @property
    def label(self) -> str:
        return trial_label(self.number)

    def words(self, known: Known) -> str:
        said = f"{self.label}: {outcome_words(self.outcome, self.held_to(known.budget))}"
        if isinstance(self.outcome, Measured):
            measured = self.outcome.measurement
            if self.number and known.reference is not None:
                said += over_reference(measured, known.reference)
            above = measured.peak.above_base
            if above is not None and known.facts is not None and known.facts.allow_lossy:
                said += f", {size(above)} beside imports and data"
            if not self.is_sure:
                said += f", unsure: other work took {measured.disturbed:.0%} of its time"
        return f"{said} (best so far)" if self.is_best and self.number else said

    def row(self, known: Known) -> dict[str, Any]:
        words = settings_words(self.settings, known.facts)
        row = {"number": self.number, "settings": words, "fits": self.feasible, "is_best": self.is_best}
        return row | outcome_row(self.outcome, self.held_to(known.budget))


@dataclass(frozen=True)
class SearchStarted(Event, kind="search_started"):
    """The space is known; trials follow."""

    study: str
    num_configurations: int
    num_trials: int
    resumed: tuple[TrialEnded, ...] = ()
    """What an earlier driver measured, in order."""

    def words(self, known: Known) -> str:
        done = f", {len(self.resumed)} of them done before" if self.resumed else ""
        configurations = count(self.num_configurations, "configuration")
        return f"study {self.study}: up to {self.num_trials} of {configurations} are tried{done}"

    def row(self, known: Known) -> dict[str, Any]:
        return {
            "study": self.study,
            "num_configurations": self.num_configurations,
            "num_trials": self.num_trials,
            "limit_bytes": known.budget.limit,
            "resumed": [each.row(known) for each in self.resumed],
        }


@dataclass(frozen=True)
class BudgetKnown(Event, kind="budget_known"):
    """The reference was measured; a budget that is a share of its peak is in bytes now."""

    budget: Budget

    def words(self, known: Known) -> str:
        return f"budget: {budget_words(self.budget)}"

    def row(self, known: Known) -> dict[str, Any]:
        return {"limit_bytes": self.budget.limit, "margin": self.budget.margin}


@dataclass(frozen=True)
class QualityKnown(Event, kind="quality_known"):
    """The job as it stands was judged, and with it how small a drop from its quality can be proven."""

    value: float
    """Its quality."""
    num_examples: int | None
    """That have a score each; None where none has."""
    allowed: float
    """What may be lost, in the same units."""
    provable: float | None
    """What about half of all plans that lose nothing are proven to be within; None where no error over examples is
    known."""
    is_proven: bool = True
    """Whether a drop is to be proven; False of inference, where the examples that there are decide."""

    def words(self, known: Known) -> str:
        said = f"quality: {self.value:.4g}, of which {self.allowed:.3g} may be lost"
        if not self.is_proven:
            return f"{said}, without training, by evaluate's own examples"
        if self.provable is None:
            return (
                f"{said}. evaluate returns a number alone: what is proven holds over seeds, for the examples that it "
                "has; how far others may differ is not known. A score for each example would tell"
            )
        if self.num_examples is None:
            return (
                f"{said}. By the standard error that evaluate returns, {MOST_ROUNDS} pairs can prove a loss of "
                f"{self.provable:.2g} at best; a score for each example would prove less"
            )
        pairs = f"{MOST_ROUNDS} pairs of {self.num_examples:,} examples"
        return f"{said}; {pairs} can prove a loss of about {self.provable:.2g}"

    def row(self, known: Known) -> dict[str, Any]:
        return {
            "value": self.value,
            "num_examples": self.num_examples,
            "allowed": self.allowed,
            "provable": self.provable,
        }


@dataclass(frozen=True)
class PredictionStarted(Event, kind="prediction_started"):
    """Memory and work of so many configurations are being predicted, before any trial."""

    num_configurations: int

    def words(self, known: Known) -> str:
        configurations = count(self.num_configurations, "configuration")
        return f"predicting the memory and work of {configurations}, without running them"

    def row(self, known: Known) -> dict[str, Any]:
        return {"num_configurations": self.num_configurations}


@dataclass(frozen=True)
class PredictionEnded(Event, kind="prediction_ended"):
    """The predictions are made."""

    num_predicted: int
    """Configurations with a prediction."""
    num_configurations: int

    def words(self, known: Known) -> str:
        return f"predicted: {self.num_predicted} of {self.num_configurations}"

    def row(self, known: Known) -> dict[str, Any]:
        return {"num_predicted": self.num_predicted, "num_configurations": self.num_configurations}


@dataclass(frozen=True)
class CutsStarted(Event, kind="cuts_started"):
    """So many cuts of the model are being judged in one process, before any trial."""

    num_cuts: int

    def words(self, known: Known) -> str:
        return f"judging {count(self.num_cuts, 'cut')} of the model in one process, beside the job as it stands"

    def row(self, known: Known) -> dict[str, Any]:
        return {"num_cuts": self.num_cuts}


@dataclass(frozen=True)
class CutsEnded(Event, kind="cuts_ended"):
    """They are judged: these are worth trials."""

    num_cuts: int
    front: tuple[tuple[Settings, float, float], ...]
    """Each with its speed over the reference's, and the change of the quality as a share of the reference's."""

    def words(self, known: Known) -> str:
        tried = f"{count(self.num_cuts, 'cut')} tried"
        if not self.front:
            return f"{tried}, none of them within what may be lost"
        found = "; ".join(
            f"{speed:.2g}x at {change:+.2%} of the quality ({settings_words(settings, known.facts)})"
            for settings, speed, change in self.front
        )
        return f"{tried}, {len(self.front)} on the front: {found}"

    def row(self, known: Known) -> dict[str, Any]:
        rows = [
            {"settings": settings_words(settings, known.facts), "speed": speed, "quality": change}
            for settings, speed, change in self.front
        ]
        return {"num_cuts": self.num_cuts, "front": rows}


@dataclass(frozen=True)
class FinalistEnded(RunEnded, kind="finalist_ended"):
    """One more run of a finalist or of the reference ended."""

    number: int
    """The trial that first measured this configuration; 0 is the reference."""
    settings: Settings
    round: int
    outcome: Outcome
    num_rounds: int | None = None
    """Planned rounds; None where they end by what they show."""

    @property
    def run(self) -> Hashable:
        return self.number, self.round

    @property
    def label(self) -> str:
        return finalist_label(self.number)

    def words(self, known: Known) -> str:
        said = outcome_words(self.outcome, self.held_to(known.budget))
        return f"{self.label}, {round_words(self.round, self.num_rounds)}: {said}"

    def row(self, known: Known) -> dict[str, Any]:
        words = settings_words(self.settings, known.facts)
        row = {"number": self.number, "round": self.round, "num_rounds": self.num_rounds, "settings": words}
        return row | outcome_row(self.outcome, self.held_to(known.budget))


@dataclass(frozen=True)
class _Anchor(Run):
    number: int
    """The reference's; where that could not be measured, the number of the first trial that was."""
    settings: Settings

    @property
    def label(self) -> str:
        return f"{finalist_label(self.number)}, as an anchor"


@dataclass(frozen=True)
class AnchorStarted(_Anchor, RunStarted, kind="anchor_started"):
    """The reference is about to be measured again, between trials."""

    def words(self, known: Known) -> str:
        return f"{self.label} starts: trials are compared with it"


@dataclass(frozen=True)
class AnchorEnded(_Anchor, RunEnded, kind="anchor_ended"):
    """That run ended: the trials about it are compared with it."""

    outcome: Outcome
    shift: float
    """What is added to the logarithm of speeds at this moment; 0 where the pace is the first reference's."""
    is_shown = False

    def words(self, known: Known) -> str:
        pace = f"; since then speeds are {math.exp(-self.shift):.2g} of what they were at first" if self.shift else ""
        return f"{self.label}: {outcome_words(self.outcome, self.held_to(known.budget))}{pace}"

    def row(self, known: Known) -> dict[str, Any]:
        return {"shift": self.shift} | outcome_row(self.outcome, self.held_to(known.budget))


@dataclass(frozen=True)
class _Ablation(Run):
    without: str | None
    """The technique that is at the reference's setting; None is the winner itself."""
    round: int
    settings: Settings

    @property
    def label(self) -> str:
        return "the plan again" if self.without is None else f"without {self.without}"

    def row(self, known: Known) -> dict[str, Any]:
        words = settings_words(self.settings, known.facts)
        return {"without": self.without, "round": self.round, "settings": words}


@dataclass(frozen=True)
class AblationStarted(_Ablation, RunStarted, kind="ablation_started"):
    """The winner, or the same without one of its choices, is about to be measured in a fresh interpreter."""

    def words(self, known: Known) -> str:
        return f"{self.label}, round {self.round}, starts: {settings_words(self.settings, known.facts)}"


@dataclass(frozen=True)
class AblationEnded(_Ablation, RunEnded, kind="ablation_ended"):
    """That run ended."""

    outcome: Outcome

    def words(self, known: Known) -> str:
        return f"{self.label}, round {self.round}: {outcome_words(self.outcome, self.held_to(known.budget))}"

    def row(self, known: Known) -> dict[str, Any]:
        return super().row(known) | outcome_row(self.outcome, self.held_to(known.budget))


@dataclass(frozen=True)
class Stopped(Event, kind="stopped"):
    """No more configurations will be tried, unless a finalist is disqualified when it is measured again."""

    reason: str

    def words(self, known: Known) -> str:
        return f"no more trials: {self.reason}{'' if self.reason == INTERRUPTED else '; the best are measured again'}"

    def row(self, known: Known) -> dict[str, Any]:
        return {"words": self.reason}


@dataclass(frozen=True)
class SecondsKnown(Event, kind="seconds_known"):
    """Where the search's seconds went, those of earlier processes included; its last event."""

    spent: Spent

    def words(self, known: Known) -> str:
        rows = (f"{done} {format_duration(sum(phases.values()))}" for done, phases in self.spent.items())
        return f"spent {format_duration(total_s(self.spent))}: {', '.join(rows)}"

    def row(self, known: Known) -> dict[str, Any]:
        return {"spent": {done: dict(phases) for done, phases in self.spent.items()}}
