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
from ..budget import in_bytes
from .observations import forgotten, observation_of
from .pace import Anchor
from .record import StudyRecord
from .tried import Tried

ANCHOR = "anchor"
"""Prefix of the keys of anchors; the number of trials that had been begun, and one of its own, follow."""

KNOWN = "known"
"""The user attribute of a trial that another search measured."""
FELL = "fell"
"""Prefix of the keys of configurations that were disqualified when measured again; the trial's number follows."""


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
    is_taken_back: bool
    """Whether its outcome says nothing: it is asked again."""

    @property
    def has_ended(self) -> bool:
        """Whether its outcome counts."""
        return self.outcome is not None and not self.is_taken_back


@dataclass(frozen=True)
class Recovered:
    """A study's trials and other stored outcomes."""

    record: StudyRecord
    """With the budget in bytes, once the reference has told them."""
    rows: tuple[Row, ...]
    tried: tuple[Tried, ...]
    """Trials that ended, by number."""
    fallen: tuple[Tried, ...]
    """Configurations that were disqualified when measured again, with that outcome."""
    evidence: dict[str, Outcome]
    """Outcomes of finalists, configurations that fell, predictions and anchors, by key."""

    @property
    def anchors(self) -> Iterator[Anchor]:
        """In the order in which they were measured."""
        keys = [key for key in self.evidence if key.startswith(f"{ANCHOR}:")]
        for key in sorted(keys, key=lambda key: [int(part) for part in key.split(":")[1:]]):
            if isinstance(found := self.evidence[key], Measured):
                yield Anchor.of(int(key.split(":")[1]), found.measurement)


def recover(study: optuna.Study, record: StudyRecord) -> Recovered:
    """Read a study, whose record is this.

    Raises:
        LookupError, TypeError, ValueError: something in it is not as this version writes it.
    """
    taken_back = forgotten(study)
    rows = tuple(_row(trial, trial.number in taken_back) for trial in study.get_trials(deepcopy=False))
    ended = sorted((row for row in rows if row.has_ended), key=lambda row: row.number)
    if len({row.number for row in ended}) < len(ended):
        raise ValueError("two trials have one number")
    evidence = {key: OUTCOME.validate_python(stored) for key, stored in study.user_attrs.items() if ":" in key}
    reference = next((row.outcome for row in ended if row.number == 0), None)
    if reference is not None:
        record = record.model_copy(update={"budget": in_bytes(record.budget, reference)})
    quality = reference.measurement.quality if isinstance(reference, Measured) else None

    def tried(row: Row, outcome: Outcome | None) -> Tried:
        assert row.settings is not None, "a trial that ended had begun"
        assert outcome is not None, "it has ended"
        verdict = record.judge(outcome, quality if row.number else None, is_reference=row.number == 0)
        return Tried(row.number, row.settings, outcome, verdict, KNOWN in row.trial.user_attrs)

    again = ((row, evidence.get(f"{FELL}:{row.number}")) for row in ended)
    return Recovered(
        record,
        rows,
        tuple(tried(row, row.outcome) for row in ended),
        tuple(tried(row, outcome) for row, outcome in again if outcome is not None),
        evidence,
    )


def _row(trial: FrozenTrial, is_taken_back: bool) -> Row:
    attrs = trial.user_attrs
    observation_of(trial)
    settings = Settings.model_validate(attrs["settings"]) if "settings" in attrs else None
    if "outcome" not in attrs:
        if trial.state == TrialState.COMPLETE and "known_from" not in attrs:
            raise ValueError(f"trial {trial.number} is complete, but what it came to is gone")
        return Row(trial, -1, settings, None, is_taken_back)
    number = attrs["number"]
    outcome: Outcome | None = OUTCOME.validate_python(attrs["outcome"])
    if not isinstance(number, int) or isinstance(number, bool) or number < 0 or settings is None:
        raise ValueError(f"trial {trial.number} has an outcome, but {number!r} for its number, and {settings}")
    if number == 0 and not isinstance(outcome, Measured | OutOfMemory):
        outcome = None  # a job that failed or was cut short had ended the search: it is measured again
    return Row(trial, number, settings, outcome, is_taken_back)


@contextmanager
def of_this_version(whose: str, instead: str) -> Iterator[None]:
    """Turn what cannot be read as this version's format into an error, before anything is changed."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as reason:  # an unknown state of a trial is the first
        said = " ".join(str(reason).split())
        raise StudyError(
            f"{whose} is not of this version: {said[:200]}. {instead}; nothing was changed in it."
        ) from None
