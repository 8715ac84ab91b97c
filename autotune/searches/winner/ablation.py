"""What each choice of the winner bought: the winner, and the same with one choice reset to the reference's, in turn.

Each round runs the winner and every choice's counterpart in fresh interpreters, under the same budget, as finalists
run. A choice is left out of further rounds once what it bought is known, or once its counterpart cannot be run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...techniques import Facts, Settings, Technique
from ...workers import Measured, MeasureRequest, Outcome
from ..events import AblationEnded, AblationStarted
from ..runs import run_once
from ..session import Session
from ..store.tried import Tried
from ..time_budget import MOST_ROUNDS
from .evidence import Pair, interval, undisturbed

_KEY = "without"
"""Prefix of the keys under which the study stores the runs."""
_WHOLE = "none"
"""In place of a technique's name: the winner itself."""
_ALIKE = 0.02
"""Relative difference in speed that counts as none."""


@dataclass(frozen=True)
class Counterpart:
    """The winner's settings with one choice reset to the reference's."""

    choice: Technique
    """As the winner has it."""
    settings: Settings
    """Everything else as the winner has it."""
    conflict: str | None
    """Why that does not go together, in words; None where it does."""


@dataclass(frozen=True)
class Share:
    """What one choice bought, as far as it was measured."""

    counterpart: Counterpart
    rounds: tuple[Pair, ...]
    """The winner and the counterpart in its reference's place, round by round."""
    ended: Outcome | None = None
    """How the counterpart failed; None where it ran."""


def counterparts(winner: Settings, reference: Settings, facts: Facts) -> Iterator[Counterpart]:
    """One for each choice of the winner that is not the reference's.

    Args:
        winner: with all that was decided.
        reference: the job as it stands.
        facts: of the task.
    """
    for choice in winner.techniques():
        own = getattr(reference, choice.name)
        if choice != own:
            settings = winner.model_copy(update={choice.name: own})
            yield Counterpart(choice, settings, settings.in_force(facts.precision).conflict())


def shares(winner: int, parts: Sequence[Counterpart], evidence: Mapping[str, Outcome]) -> list[Share]:
    """What is stored of each choice's runs.

    Args:
        winner: its trial's number.
        parts: its counterparts.
        evidence: outcomes by key, as the study has them.
    """
    return [_share(winner, part, evidence) for part in parts]


def ablate(session: Session, winner: Tried) -> None:
    """Measure what each choice bought, and keep it with the study. Ends early where ``--max-time`` or an interruption
    leaves no more; what an earlier process measured is not measured again.

    Args:
        session: the search, whose plan is written.
        winner: what the plan is of.
    """
    evidence: dict[str, Outcome] = {}
    parts = list(counterparts(winner.applied, session.reference_settings, session.facts))
    for part in parts:
        if part.conflict is not None:
            session.warn(f"--ablate: {part.choice.name} cannot be reset alone: {part.conflict}.")
    if not parts:
        session.warn("--ablate: the plan is the job as it stands, so that there is no choice to reset.")
    for number in range(1, MOST_ROUNDS + 1):
        open_parts = [part for part in parts if part.conflict is None and not _is_known(winner.number, part, evidence)]
        if not open_parts:
            return
        turn = (number - 1) % len(open_parts)  # who runs long after the winner differs from round to round
        asked = [None, *open_parts[turn:], *open_parts[:turn]]
        for position, one in enumerate(asked):
            key = _key(winner.number, number, one)
            settings = one.settings if one else winner.applied
            run = AblationStarted(one.choice.name if one else None, number, settings)
            found = _run(session, key, run, len(asked) - position)
            if found is None:
                return
            evidence[key] = found
            if one is None and not isinstance(found, Measured):
                session.warn("--ablate: the plan itself did not run again, so that there is nothing to compare with.")
                return


def _run(session: Session, key: str, run: AblationStarted, runs_left: int) -> Outcome | None:
    """One run's outcome, or the stored one; None where there is no time for it."""

    def make() -> MeasureRequest | None:
        share_s = session.time_budget.finalist_share_s(0, runs_left)
        name = f"without-{run.without or _WHOLE}-round-{run.round}"
        return None if share_s is None else session.request(name, run.settings, share_s, run.round)

    def ended(outcome: Outcome) -> AblationEnded:
        return AblationEnded(run.without, run.round, run.settings, outcome)

    return run_once(session, key, make, run, ended)


def _share(winner: int, part: Counterpart, evidence: Mapping[str, Outcome]) -> Share:
    rounds: list[Pair] = []
    ended: Outcome | None = None
    for number in range(1, MOST_ROUNDS + 1):
        own, other = (evidence.get(_key(winner, number, one)) for one in (None, part))
        if isinstance(own, Measured) and isinstance(other, Measured):
            rounds.append(Pair(own.measurement, other.measurement))
        elif other is not None and not isinstance(other, Measured):
            ended = other
    return Share(part, tuple(rounds), ended)


def _is_known(winner: int, part: Counterpart, evidence: Mapping[str, Outcome]) -> bool:
    """Whether another round would tell nothing new: it fails, or its effect on the speed is proven, or none."""
    found = _share(winner, part, evidence)
    if found.ended is not None:
        return True
    ratios = [ratio for pair in undisturbed(found.rounds) if (ratio := pair.log_ratio) is not None]
    if len(ratios) < 2:
        return False
    known = interval(ratios)
    return known.low > 0 or known.high < 0 or max(-known.low, known.high) < _ALIKE


def _key(winner: int, number: int, part: Counterpart | None) -> str:
    return f"{_KEY}:{winner}:{number}:{part.choice.name if part else _WHOLE}"
