"""A study as a report or a calibration needs it, read without a lock: a search may write to it. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

import optuna
from optuna.storages import RDBStorage

from ...errors import StudyError
from ...files import FOLDER
from ...measure import Measurement
from ...plan import Plan
from ...techniques import Facts, Settings
from ...workers import Measured, Outcome
from ...workers.outcome import OUTCOME
from ..budget import in_bytes
from ..predicted.forecast import Forecast
from ..sampler.expected_gain import forgotten
from ..verdict import judge
from .record import StudyRecord
from .recovered import Row, recover
from .storage import check_file, newest_first, read_storage
from .study import FELL, PLAN
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
    """Trials that ended, by number; at least one."""
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
    with read_storage(url) as storage, _of_this_version(url):
        names = _newest_first(storage)
        if not names or (name is not None and name not in names):
            there = f"It holds {', '.join(names)}." if names else "It holds none: search first, `autotune search`."
            raise StudyError(f"{masked(url)}: there is no study {name or 'there'}. {there}")
        study = optuna.load_study(study_name=name or names[0], storage=storage)
        return _stored(study, url)


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
    recovered, taken_back = recover(study), forgotten(study)
    rows = [row for row in recovered.rows if row.outcome is not None and row.trial.number not in taken_back]
    if not rows:
        raise StudyError(
            f"{masked(url)}: no trial of study {study.study_name} has ended, so that there is nothing to report. "
            "`autotune search --resume` goes on with it."
        )
    record = StudyRecord.model_validate(study.user_attrs)
    first = next((row.outcome for row in rows if row.number == 0), None)
    if first is not None:
        record = record.model_copy(update={"budget": in_bytes(record.budget, first)})
    tried = [_tried(row.number, row.settings, row.outcome, record, first) for row in rows]
    fallen = {
        row.number: _tried(row.number, row.settings, again, record, first)
        for row in tried
        if (again := recovered.evidence.get(f"{FELL}:{row.number}")) is not None
    }
    plan = study.user_attrs.get(PLAN)
    return Stored(
        study.study_name,
        masked(url),
        record,
        tuple(sorted(tried, key=lambda row: row.number)),
        dict(_forecasts(rows)),
        fallen,
        recovered.evidence,
        None if plan is None else Plan.from_yaml(plan, f"the plan of study {study.study_name}"),
    )


def _tried(
    number: int, settings: Settings | None, outcome: Outcome | None, record: StudyRecord, first: Outcome | None
) -> Tried:
    assert settings is not None, "a trial that ended had begun"
    assert outcome is not None, "it has ended"
    quality = first.measurement.quality if isinstance(first, Measured) else None
    memory_bytes = record.facts.device.memory_bytes
    return Tried(
        number, settings, outcome, judge(outcome, record.budget, memory_bytes, quality, record.max_quality_drop)
    )


def _forecasts(rows: list[Row]) -> Iterator[tuple[int, Forecast]]:
    for row in rows:
        if (stored := row.trial.user_attrs.get("forecast")) is not None:
            yield row.number, Forecast.model_validate(stored)


def _written(settings: Settings) -> object:
    """As a plan's file has them: without what lies beside it."""
    return settings.written()


@contextmanager
def _of_this_version(url: str) -> Iterator[None]:
    """Turn what cannot be read as this version's format into an error."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as reason:
        said = " ".join(str(reason).split())
        raise StudyError(
            f"{masked(url)}: the study is not of this version: {said[:200]}. Use the version of autotune that "
            "searched; nothing was changed in it."
        ) from None


@dataclass(frozen=True)
class Finished:
    """A study's measurements so far, for a calibration."""

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
