"""The Optuna study: proposals, outcomes, and everything needed to go on after a kill at any moment."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from ...measure import Measurement
from ...measure.measurement import Quality
from ...techniques import Settings
from ...workers import Dropped, Measured, Outcome
from ...workers.outcome import OUTCOME
from ..budget import in_bytes
from ..verdict import CONSTRAINTS, Verdict, observation
from .exclusive import ExclusiveStorage
from .observations import Foreseeing, correct, forget, observe, withdraw
from .pace import Anchor, Paces
from .record import StudyRecord, check_same
from .recovered import ANCHOR, FELL, KNOWN, Recovered, Row, of_this_version, recover
from .storage import newest_number, newest_of, storage_errors
from .tried import Tried, trimmed
from .url import masked

PLAN = "plan"
"""The study's user attribute that holds the plan that its search wrote, as YAML."""

SPENT = "spent"
"""The study's user attribute that holds where its search's seconds went."""


class Study:
    """One search's trials in a storage. Only this class writes there."""

    def __init__(self, store: ExclusiveStorage, study: optuna.Study, record: StudyRecord) -> None:
        self.name: str = study.study_name
        self.record = record
        self.tried: list[Tried] = []
        """Measured configurations, by number."""
        self.by_settings: dict[str, Tried] = {}
        """The same by ``settings.canonical()``."""
        self.fallen: list[Tried] = []
        """Disqualified configurations: they could not be used when measured again, each with that outcome."""
        self.lost: list[Settings] = []
        """Configurations that were running when an earlier process was killed."""
        self.resumed = False
        """Whether an earlier process began the study."""
        self.paces = Paces()
        """How trials' speeds compare, by later measurements of the reference."""
        self.instead_of = ""
        """Where no study was found to resume, what was there instead, in words."""
        self._store, self._study = store, study
        self._next_number = 0
        self._sampler = ""
        """Name of the one that is set, as it is stored."""

    @classmethod
    def create(cls, url: str, stem: str, record: StudyRecord) -> Self:
        """Begin ``<stem>-<k>``, k being the first free number.

        Raises:
            StudyError: the storage is locked, corrupt, or cannot be written.
        """
        store = ExclusiveStorage(url)
        with store.released_on_error(), storage_errors(url):
            return cls._begin(store, f"{stem}-{newest_number(store.storage, stem) + 1}", record)

    @classmethod
    def resume(cls, url: str, stem: str, record: StudyRecord) -> Self:
        """Go on with this task's newest study: what was measured is kept, what was running is asked again.

        Where there is none, since the earlier process was killed before it made one or none ever ran, a study is begun.

        Raises:
            StudyError: it was searched under other options, or only other tasks have studies there, or the storage is
                locked or corrupt, or holds what this version does not.
        """
        store = ExclusiveStorage(url)
        with store.released_on_error(), storage_errors(url):
            if newest_number(store.storage, stem) == 0:
                found = store.found_empty()
                begun = cls._begin(store, f"{stem}-1", record)
                begun.instead_of = found
                return begun
            whose = f"--resume: the study of {stem} in {masked(url)}"
            with of_this_version(whose, "Leave out --resume to begin another"):
                study = newest_of(store.storage, stem, record.fingerprint)
                if not study.get_trials(deepcopy=False):  # killed before it had begun
                    _describe(study, record)
                stored = StudyRecord.model_validate(study.user_attrs)
                check_same(study.study_name, stored, record)
                recovered = recover(study, stored)
            resumed = cls(store, study, recovered.record)
            resumed.resumed = True
            resumed._take_over(recovered)
        return resumed

    @property
    def feasible(self) -> list[Tried]:
        """Usable configurations, fastest first."""
        fallen, dropped = {row.number for row in self.fallen}, [row.settings.part("function") for row in self._dropped]
        usable = (row for row in self.tried if row.verdict.feasible and row.number not in fallen)
        rows = [row for row in usable if row.settings.part("function") not in dropped]
        return sorted(rows, key=lambda row: -self.log_speed(row))

    def log_speed(self, row: Tried) -> float:
        """Natural logarithm of a usable trial's speed, as it compares with others'."""
        return (row.verdict.log_speed or 0.0) + self.paces.of(row.number).shift

    @property
    def first_measured(self) -> Tried | None:
        """What anchors measure again: the reference, or the first trial that could be measured where that could not."""
        own = (row for row in self.tried if not row.known or row.number == 0)
        return min((row for row in own if isinstance(row.outcome, Measured)), key=lambda row: row.number, default=None)

    @property
    def num_measured(self) -> int:
        """Configurations that this search measured itself."""
        return sum(not row.known for row in self.tried)

    def judged(self, settings: Settings) -> Tried | None:
        """A trial that computes the same function, and whose quality is known: what else it was set to may round, and
        changes it no further."""
        part = settings.part("function")
        if part == Settings():
            return None
        rows = [*self._dropped, *(row for row in self.tried if row.has_quality)]
        return next((row for row in rows if row.settings.part("function") == part), None)

    @property
    def _dropped(self) -> list[Tried]:
        """Functions whose quality was not proven: every configuration that computes one of them is disqualified."""
        return [row for row in self.fallen if isinstance(row.outcome, Dropped)]

    @property
    def reference_quality(self) -> Quality | None:
        """Quality of the job as it stands; None until it is measured."""
        found = next((row.outcome for row in self.tried if row.number == 0), None)
        return found.measurement.quality if isinstance(found, Measured) else None

    @property
    def num_asked(self) -> int:
        """Optuna's number of trials, with those that were proposed and not measured."""
        return len(self._study.get_trials(deepcopy=False))

    def use(self, name: str, sampler: BaseSampler) -> None:
        """Set the sampler; the study stores only its name."""
        if name != self._sampler:
            with self._store.writing():
                self._study.set_user_attr("sampler", name)
        self._sampler = name
        self._study.sampler = sampler

    def settled(self) -> str | None:
        """Why the sampler stops, in words; None if it does not, or cannot tell."""
        sampler = self._study.sampler
        return sampler.stop_reason(self._study) if isinstance(sampler, Foreseeing) else None

    def promises(self) -> Callable[[Mapping[str, Any]], float | None]:
        """As :meth:`Foreseeing.promises`; None of everything where the sampler cannot tell."""
        sampler = self._study.sampler
        return sampler.promises(self._study) if isinstance(sampler, Foreseeing) else lambda params: None

    def ask(self, distributions: Mapping[str, BaseDistribution], params: dict[str, Any] | None = None) -> optuna.Trial:
        """The sampler's next proposal, or ``params`` where given.

        Trials that a killed process had queued and not asked for would come before ``params``: they are withdrawn.
        """
        with self._store.writing():
            if params is not None:
                self._study.enqueue_trial(params)
            trial = self._study.ask(dict(distributions))
            while params is not None and trial.params != params:
                self.skip(trial, None)
                trial = self._study.ask(dict(distributions))
            return trial

    def begin(self, trial: optuna.Trial, settings: Settings) -> int:
        """A proposal is about to be measured; returns its number."""
        number, self._next_number = self._next_number, self._next_number + 1
        sampler = self._study.sampler
        forecast = sampler.forecast(trial.params) if isinstance(sampler, Foreseeing) else None
        with self._store.writing():
            trial.set_user_attr("number", number)
            trial.set_user_attr("settings", settings.model_dump(mode="json", exclude_defaults=True))
            if forecast is not None:
                trial.set_user_attr("forecast", forecast.model_dump(mode="json"))
        return number

    def finish(
        self, trial: optuna.Trial, number: int, settings: Settings, outcome: Outcome, known: bool = False
    ) -> Tried:
        """Store an outcome, then tell Optuna; a kill in between is repaired on resume."""
        with self._store.writing():
            if known:
                trial.set_user_attr(KNOWN, True)
            trial.set_user_attr("outcome", trimmed(outcome).model_dump(mode="json"))
            tried = self._take(number, settings, outcome, known)
            self._tell(trial, tried)
            self._correct()
        self._store.checkpoint()
        return tried

    def skip(self, trial: optuna.Trial, known: Tried | None) -> None:
        """Take back a proposal that is not measured: tell Optuna the ``known`` outcome, or withdraw it."""
        with self._store.writing():
            if known is None:
                withdraw(trial)
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                trial.set_user_attr("known_from", known.number)
                self._tell(trial, known)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the outcomes of these trials (by Optuna's numbers), which say nothing: they are asked again on
        ``--resume``."""
        with storage_errors(self._store.url):
            forget(self._study, numbers)

    def fell(self, row: Tried) -> None:
        """Store that a configuration could not be used when it was measured again."""
        self.keep_evidence(f"{FELL}:{row.number}", row.outcome)
        self.fallen.append(row)

    def evidence(self, key: str) -> Outcome | None:
        """An outcome that :meth:`keep_evidence` stored."""
        stored = self.kept(key)
        return None if stored is None else OUTCOME.validate_python(stored)

    def keep_evidence(self, key: str, outcome: Outcome) -> None:
        """Store a finalist's outcome under a key of its own."""
        self.keep(key, trimmed(outcome).model_dump(mode="json"))

    def kept(self, key: str) -> Any:
        """What :meth:`keep` stored; None where it did not."""
        with self._store.writing():
            return self._study.user_attrs.get(key)

    def keep(self, key: str, value: Any) -> None:
        """Store plain data beside the trials, in place of what was there."""
        with self._store.writing():
            self._study.set_user_attr(key, value)
        self._store.checkpoint()

    def anchor_key(self, position: int) -> str:
        """The key of the next anchor, before the trial of this number."""
        return f"{ANCHOR}:{position}:{sum(one.position == position for one in self.paces.anchors)}"

    def take_anchor(self, position: int, found: Measurement) -> None:
        """Compare trials with one more measurement of the reference, which is stored."""
        self.paces.anchors.append(Anchor.of(position, found))
        with self._store.writing():
            self._correct()

    def _correct(self) -> None:
        """Compare all speeds by the anchors that there are now, and tell the sampler."""
        own = ((row.number, row.outcome) for row in self.tried if not row.known or row.number == 0)
        measured = {number: outcome.measurement for number, outcome in own if isinstance(outcome, Measured)}
        if self.paces.update(measured):
            asked = ((trial.number, trial.user_attrs) for trial in self._study.get_trials(deepcopy=False))
            found = ((each, self.paces.of(attrs.get("number", attrs.get("known_from", 0)))) for each, attrs in asked)
            correct(self._study, {each: (one.shift, one.error) for each, one in found})

    def close(self) -> None:
        """Let another process use the storage."""
        self._store.close()

    @classmethod
    def _begin(cls, store: ExclusiveStorage, name: str, record: StudyRecord) -> Self:
        study = optuna.create_study(storage=store.storage, study_name=name, direction="maximize")
        _describe(study, record)
        store.checkpoint()
        return cls(store, study, record)

    def _take(self, number: int, settings: Settings, outcome: Outcome, known: bool = False) -> Tried:
        if number == 0:
            self.record = self.record.model_copy(update={"budget": in_bytes(self.record.budget, outcome)})
        tried = Tried(number, settings, outcome, self.judge(outcome, is_reference=number == 0), known)
        self.tried.append(tried)
        self.tried.sort(key=lambda row: row.number)
        self.by_settings[settings.canonical()] = tried
        return tried

    def judge(self, outcome: Outcome, is_reference: bool = False) -> Verdict:
        """The verdict on an outcome, by the study's budget and options."""
        return self.record.judge(outcome, self.reference_quality, is_reference)

    def _tell(self, trial: optuna.Trial, tried: Tried) -> None:
        verdict = tried.verdict
        observe(trial, observation(tried.outcome, verdict))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # set_constraint warns where a killed driver had already set it
            for key, value in zip(CONSTRAINTS, verdict.constraints, strict=True):
                trial.set_constraint(key, value)
        known = [row.verdict.log_speed for row in self.tried if row.verdict.log_speed is not None]
        imputed = statistics.median(known) if known else 0.0
        if not trial.params:  # outside the space: a COMPLETE trial without parameters would empty the sampler's space
            self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            return
        value = imputed if verdict.log_speed is None else verdict.log_speed
        self._study.tell(trial, value, skip_if_finished=True)

    def _take_over(self, recovered: Recovered) -> None:
        """Keep what was measured; tell Optuna of outcomes, and ask again for trials that have none or were taken
        back."""
        self.tried, self.fallen = list(recovered.tried), list(recovered.fallen)
        self.by_settings = {tried.settings.canonical(): tried for tried in self.tried}
        self._next_number = 1 + max((tried.number for tried in self.tried), default=-1)
        for row in recovered.rows:
            if row.is_taken_back and row.settings is not None:
                self.lost.append(row.settings)
            elif row.trial.state == TrialState.RUNNING:
                self._settle(row)
        self.paces.anchors = list(recovered.anchors)
        self._correct()

    def _settle(self, row: Row) -> None:
        study_id = self._store.storage.get_study_id_from_name(self.name)
        trial_id = self._store.storage.get_trial_id_from_study_id_trial_number(study_id, row.trial.number)
        trial = optuna.Trial(self._study, trial_id)
        tried = next((one for one in self.tried if one.number == row.number), None)
        if tried is not None:
            self._tell(trial, tried)
            return
        if row.settings is not None:
            self.lost.append(row.settings)
        withdraw(trial)
        self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)


def _describe(study: optuna.Study, record: StudyRecord) -> None:
    for key, value in record.model_dump(mode="json").items():
        study.set_user_attr(key, value)
