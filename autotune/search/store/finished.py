"""Reads the measurements of a task's newest study, without a lock: a search may be writing to it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import optuna

from ...measure import Measurement
from ...techniques import Facts, Settings
from ...workers import Measured
from ...workers.outcome import OUTCOME
from .storage import check_file, newest_first, read_storage
from .url import sqlite_path


@dataclass(frozen=True)
class Finished:
    """A study's measurements so far."""

    name: str
    facts: Facts
    measured: tuple[tuple[Settings, Measurement], ...]


def finished(url: str, stem: str, fingerprint: str) -> Finished | None:
    """The measurements of the task's newest study that has any; None where there is none. A search may be writing to
    it; nothing is written.

    Raises:
        StudyError: the storage is locked or corrupt, or of another version of Optuna.
    """
    path = sqlite_path(url)
    if path is not None:
        check_file(path)
        if not path.exists() or path.stat().st_size == 0:
            return None
    with read_storage(url) as storage:
        for study in newest_first(storage, stem):
            with suppress(KeyError, ValueError):  # half begun, or of another version
                if study.user_attrs["fingerprint"] == fingerprint and (found := _finished(study)).measured:
                    return found
    return None


def _finished(study: optuna.Study) -> Finished:
    trials = [trial.user_attrs for trial in study.get_trials(deepcopy=False)]
    outcomes = [(row["settings"], OUTCOME.validate_python(row["outcome"])) for row in trials if "outcome" in row]
    measured = tuple(
        (Settings.model_validate(settings), outcome.measurement)
        for settings, outcome in outcomes
        if isinstance(outcome, Measured)
    )
    return Finished(study.study_name, Facts.model_validate(study.user_attrs["facts"]), measured)
