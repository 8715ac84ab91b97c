"""A study as a report or a calibration needs it, read without a lock: a search may write to it. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import optuna
from optuna.storages import RDBStorage

from ...errors import PlanError, StudyError
from ...files import FOLDER
from ...measure import Measurement
from ...plan import Plan
from ...techniques import Settings
from ...workers import Measured, Outcome
from .forecast import Forecast
from .record import StudyRecord
from .recovered import Row, of_this_version, recover
from .storage import check_file, newest_first, read_storage
from .study import PLAN
from .tried import Tried
from .url import masked, sqlite_path


@dataclass(frozen=True)
class Stored:
    """What a search has stored so far."""

    name: str
    """The study's."""
    where: str
    """Its storage, without a password."""
    record: StudyRecord
    """With the budget in bytes, once the reference has told them."""
    tried: tuple[Tried, ...]
    """Trials that ended, by number."""
    forecasts: Mapping[int, Forecast]
    """The predictions for a trial before it ran, by number."""
    fallen: Mapping[int, Tried]
    """Configurations that were disqualified when measured again, by number, with that outcome."""
    evidence: Mapping[str, Outcome]
    """All other outcomes, by key."""
    plan: Plan | None
    """The search's plan; None until it has ended."""

    @property
    def reference(self) -> Tried | None:
        """Trial 0; None where it has not ended."""
        return next((row for row in self.tried if row.number == 0), None)

    @property
    def measured(self) -> tuple[tuple[Settings, Measurement], ...]:
        """What could be measured, by number."""
        outcomes = ((row.settings, row.outcome) for row in self.tried)
        return tuple((settings, found.measurement) for settings, found in outcomes if isinstance(found, Measured))

    @property
    def best(self) -> Tried | None:
        """The fastest trial that can be used; None where none can."""
        usable = [row for row in self.tried if row.verdict.feasible and row.number not in self.fallen]
        return max(usable, key=lambda row: row.verdict.log_speed or 0.0, default=None)

    @cached_property
    def winner(self) -> Tried | None:
        """The trial that the plan is of."""
        if self.plan is None:
            return None
        wanted, precision = self.plan.settings, self.record.facts.precision
        return next((row for row in self.tried if _written(row.applied.in_force(precision)) == _written(wanted)), None)


def url_of(study: str) -> str:
    """The storage's URL: a path is that of a SQLite file."""
    return study if "://" in study else f"sqlite:///{study}"


def read_study(url: str, name: str | None = None) -> Stored:
    """Read a study.

    Args:
        url: of its storage.
        name: the study's; None is the newest there.

    Raises:
        StudyError: no such storage or study, none of its trials has ended, or it is of another version.
    """
    _check_is_there(url)
    version = of_this_version(f"{masked(url)}: the study", "Use the version of autotune that searched")
    with read_storage(url) as storage, version:
        names = _newest_first(storage)
        if not names or (name is not None and name not in names):
            there = f"It holds {', '.join(names)}." if names else "It holds none: search first, `autotune search`."
            raise StudyError(f"{masked(url)}: there is no study {name or 'there'}. {there}")
        study = optuna.load_study(study_name=name or names[0], storage=storage)
        found = _stored(study, url)
        if not found.tried:
            raise StudyError(
                f"{masked(url)}: no trial of study {study.study_name} has ended, so that there is nothing to report. "
                "`autotune search --resume` goes on with it."
            )
        return found


def _newest_first(storage: RDBStorage) -> list[str]:
    return [study.study_name for study in reversed(storage.get_all_studies())]


def _check_is_there(url: str) -> None:
    """Refuse a file that is missing or empty: to open it would make a storage of it."""
    path = sqlite_path(url)
    if path is None or (path.exists() and (not path.is_file() or path.stat().st_size > 0)):
        return
    here = sorted(map(str, FOLDER.glob("*.db")))
    there = f" Here there are {', '.join(here)}." if here else ""
    raise StudyError(
        f"{path}: no such study. Give the file or URL that `autotune search --storage` was given; without that, it "
        f"keeps studies in {FOLDER}/, in the folder that it was started in.{there}"
    )


def _stored(study: optuna.Study, url: str) -> Stored:
    recovered = recover(study, StudyRecord.model_validate(study.user_attrs))
    plan = study.user_attrs.get(PLAN)
    return Stored(
        study.study_name,
        masked(url),
        recovered.record,
        recovered.tried,
        dict(_forecasts(recovered.rows)),
        {row.number: row for row in recovered.fallen},
        recovered.evidence,
        None if plan is None else Plan.from_yaml(plan, f"the plan of study {study.study_name}"),
    )


def _forecasts(rows: Iterable[Row]) -> Iterator[tuple[int, Forecast]]:
    for row in rows:
        if row.has_ended and (stored := row.trial.user_attrs.get("forecast")) is not None:
            yield row.number, Forecast.model_validate(stored)


def _written(settings: Settings) -> object:
    """As a plan's file has them: without what lies beside it."""
    return settings.written()


def finished(url: str, stem: str, fingerprint: str) -> Stored | None:
    """The task's newest study that has measured anything; None where there is none.

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
            with suppress(LookupError, TypeError, ValueError, PlanError):  # half begun, or of another version
                found = _stored(study, url)
                if found.record.fingerprint == fingerprint and found.measured:
                    return found
    return None
