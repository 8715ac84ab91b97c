"""Reads what an earlier process stored in a study, as a whole, before anything uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState

from ...errors import StudyError
from ...techniques import Settings
from ...workers import Measured, Outcome, OutOfMemory
from ...workers.outcome import OUTCOME
from ..sampler.expected_gain import forgotten, observation_of
from .pace import Anchor
from .url import masked

ANCHOR = "anchor"
"""Prefix of the keys of anchors; the number of trials that had been begun, and one of its own, follow."""


@dataclass(frozen=True)
class Row:
    """One trial of Optuna's."""

    trial: FrozenTrial
    number: int
    """Number among measured configurations; -1 for one that was proposed and not begun."""
    settings: Settings | None
    """The configuration; None for one that was proposed and not begun."""
    outcome: Outcome | None
    """The outcome; None for a trial that was running."""


@dataclass(frozen=True)
class Recovered:
    """A study's trials and other stored outcomes."""

    rows: tuple[Row, ...]
    evidence: dict[str, Outcome]
    """Outcomes of finalists, configurations that fell, predictions and anchors, by key."""

    @property
    def anchors(self) -> Iterator[Anchor]:
        """In the order in which they were measured."""
        keys = [key for key in self.evidence if key.startswith(f"{ANCHOR}:")]
        for key in sorted(keys, key=lambda key: [int(part) for part in key.split(":")[1:]]):
            if isinstance(found := self.evidence[key], Measured):
                yield Anchor.of(int(key.split(":")[1]), found.measurement)


def recover(study: optuna.Study) -> Recovered:
    """Read a study.

    Raises:
        LookupError, TypeError, ValueError: something in it is not as this version writes it.
    """
    rows = tuple(map(_row, study.get_trials(deepcopy=False)))
    taken_back = forgotten(study)
    numbers = [row.number for row in rows if row.outcome is not None and row.trial.number not in taken_back]
    if len(set(numbers)) < len(numbers):
        raise ValueError("two trials have one number")
    attrs = study.user_attrs.items()
    return Recovered(rows, {key: OUTCOME.validate_python(stored) for key, stored in attrs if ":" in key})


def _row(trial: FrozenTrial) -> Row:
    attrs = trial.user_attrs
    observation_of(trial)
    settings = Settings.model_validate(attrs["settings"]) if "settings" in attrs else None
    if "outcome" not in attrs:
        if trial.state == TrialState.COMPLETE and "known_from" not in attrs:
            raise ValueError(f"trial {trial.number} is complete, but what it came to is gone")
        return Row(trial, -1, settings, None)
    number = attrs["number"]
    outcome: Outcome | None = OUTCOME.validate_python(attrs["outcome"])
    if not isinstance(number, int) or isinstance(number, bool) or number < 0 or settings is None:
        raise ValueError(f"trial {trial.number} has an outcome, but {number!r} for its number, and {settings}")
    if number == 0 and not isinstance(outcome, Measured | OutOfMemory):
        outcome = None  # a job that failed or was cut short had ended the search: it is measured again
    return Row(trial, number, settings, outcome)


@contextmanager
def of_this_version(stem: str, url: str) -> Iterator[None]:
    """Turn what cannot be read as this version's format into an error, before anything is changed."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as reason:  # an unknown state of a trial is the first
        said = " ".join(str(reason).split())
        raise StudyError(
            f"--resume: the study of {stem} in {masked(url)} is not of this version: {said[:200]}. "
            "Leave out --resume to begin another; nothing was changed in it."
        ) from None
