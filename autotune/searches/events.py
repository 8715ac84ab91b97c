"""Events of a running search. Frozen data: the command line draws them, tests assert on them."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Budget
from ..techniques import Facts, Settings
from ..workers import Outcome
from .seconds import Spent

INTERRUPTED = "interrupted"
"""``Stopped.reason``, and ``Plan.search.stopped``, after the user's Ctrl-C."""


@dataclass(frozen=True)
class Inspected:
    """The task loaded, and this is what is known of it."""

    facts: Facts
    seconds: float = 0.0
    """What that took."""


@dataclass(frozen=True)
class Warned:
    """A message that the user must see, such as a request that could not be met."""

    message: str


@dataclass(frozen=True)
class TrialStarted:
    """A trial process is about to run. Number 0 is the reference; finalists carry their round."""

    number: int
    settings: Settings
    finalist_round: int | None = None
    by_turns: bool = False
    """Whether the reference lives at the same time, and the two take turns."""
    promise: float | None = None
    """Expected gain in the logarithm of the speed, for each second of the trial; None where it is not known."""


@dataclass(frozen=True)
class TrialEnded:
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


@dataclass(frozen=True)
class SearchStarted:
    """The space is known; trials follow."""

    study: str
    num_configurations: int
    num_trials: int
    resumed: tuple[TrialEnded, ...] = ()
    """What an earlier driver measured, in order."""


@dataclass(frozen=True)
class BudgetKnown:
    """The reference was measured; a budget that is a share of its peak is in bytes now."""

    budget: Budget


@dataclass(frozen=True)
class PredictionStarted:
    """Memory and work of so many configurations are being predicted, before any trial."""

    num_configurations: int


@dataclass(frozen=True)
class PredictionEnded:
    """The predictions are made."""

    num_predicted: int
    """Configurations with a prediction."""
    num_configurations: int


@dataclass(frozen=True)
class FinalistEnded:
    """One more run of a finalist or of the reference ended."""

    number: int
    """The trial that first measured this configuration; 0 is the reference."""
    settings: Settings
    round: int
    outcome: Outcome
    num_rounds: int | None = None
    """Planned rounds; None where they end by what they show."""


@dataclass(frozen=True)
class AnchorStarted:
    """The reference is about to be measured again, between trials."""

    number: int
    """The reference's; where that could not be measured, the number of the first trial that was."""
    settings: Settings


@dataclass(frozen=True)
class AnchorEnded:
    """That run ended: the trials about it are compared with it."""

    number: int
    settings: Settings
    outcome: Outcome
    shift: float
    """What is added to the logarithm of speeds at this moment; 0 where the pace is the first reference's."""


@dataclass(frozen=True)
class AblationStarted:
    """The winner, or the same without one of its choices, is about to be measured in a fresh interpreter."""

    without: str | None
    """The technique that is at the reference's setting; None is the winner itself."""
    round: int
    settings: Settings


@dataclass(frozen=True)
class AblationEnded:
    """That run ended."""

    without: str | None
    round: int
    settings: Settings
    outcome: Outcome


@dataclass(frozen=True)
class Stopped:
    """No more configurations will be tried, unless a finalist is disqualified when it is measured again."""

    reason: str


@dataclass(frozen=True)
class SecondsKnown:
    """Where the search's seconds went, those of earlier processes included; its last event."""

    spent: Spent


Event = (
    Inspected
    | BudgetKnown
    | SearchStarted
    | Warned
    | PredictionStarted
    | PredictionEnded
    | TrialStarted
    | TrialEnded
    | AnchorStarted
    | AnchorEnded
    | FinalistEnded
    | AblationStarted
    | AblationEnded
    | Stopped
    | SecondsKnown
)
