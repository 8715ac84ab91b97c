"""``autotune estimate``: for each combination of techniques the largest micro-batch that fits, without a device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import NothingFits, StudyError, TaskError
from ..estimate import Calibration, Estimate, EstimateOptions, Interval, PredictOptions
from ..search_spaces import load_space
from ..techniques import TECHNIQUES, Device, Facts, Settings, Technique
from ..techniques.batch import Batch
from ..units import ceil_mib, format_bytes
from ..workers import Estimated, Executor, Failed, Outcome, Predicted, PredictRequest
from ..workers.environment import own_thread_variables
from ..workers.traces import first_line
from .calibration import learn_calibration
from .finished import Finished, finished
from .inquiry import LARGEST_OF, failure, inspect
from .options import SearchOptions
from .pace import Pace
from .storage import default_url
from .storage_url import masked

__all__ = ["Combination", "Estimation", "WhatToEstimate", "estimate"]

_MOST_MICRO = 2**16
_MOST_CALIBRATING_S = 60.0
"""Seconds after which no further law is traced for trials; those of a search are kept."""


@dataclass(frozen=True)
class WhatToEstimate:
    """What the user asked for. Every field is a command-line option of ``autotune estimate``."""

    task: str
    """``model.py`` or ``model.py:name``."""
    budget_bytes: int | None = None
    """``--budget``; None is all of the device's memory."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device type that is planned for; it need not be here."""
    device_memory_bytes: int | None = None
    """``--device-memory``: of the CUDA device that is planned for."""
    space: str = "default"
    """``--space``: a preset's name or a YAML file."""
    effective_batch: int | None = None
    """``--effective-batch``."""
    storage: str | None = None
    """``--storage``: where studies are, whose trials calibrate the estimate; None is SQLite under ``.autotune/``."""

    @property
    def limit_bytes(self) -> int | None:
        """What the process may be charged, as far as the user said."""
        said = [size for size in (self.budget_bytes, self.device_memory_bytes) if size is not None]
        return min(said, default=None)


@dataclass(frozen=True)
class Combination:
    """Some techniques together, and what they take."""

    settings: Settings
    """Without a batch."""
    outcome: Outcome
    """``Estimated``, or why not."""

    @property
    def estimate(self) -> Estimate | None:
        """None where it could not be had."""
        return self.outcome.estimate if isinstance(self.outcome, Estimated) else None

    @property
    def micro(self) -> int:
        """The largest micro-batch that is likely to fit; 0 where none is."""
        return self.estimate.largest.micro if self.estimate is not None and self.estimate.largest is not None else 0

    @property
    def num_changes(self) -> int:
        """Techniques that differ from the job as it stands."""
        return len(self.settings.model_dump(exclude_defaults=True))


@dataclass(frozen=True)
class Estimation:
    """All of them."""

    what: WhatToEstimate
    facts: Facts
    limit_bytes: int
    """What the device may charge the process."""
    combinations: tuple[Combination, ...]
    """The job as it stands first, then by the number of techniques."""
    calibration: Calibration | None = None
    """What a search's trials have shown of such predictions."""
    study: str | None = None
    """The study that they are of."""
    uncalibrated: str | None = None
    """Why a study that is there says nothing."""

    @property
    def base(self) -> Combination:
        """The job as it stands."""
        return self.combinations[0]

    def distinct(self) -> list[Combination]:
        """Those that do not take just what one before them takes."""
        found: dict[object, Combination] = {}
        for one in self.combinations:
            estimate = one.estimate
            key = one.settings if estimate is None else (one.micro, estimate.surely, estimate.reference.tensors.value)
            found.setdefault(key, one)
        return list(found.values())

    def helps(self) -> list[Combination]:
        """Each technique alone, where it lets a larger micro-batch fit than the job as it stands: the most first."""
        alone = (one for one in self.distinct() if one.num_changes == 1 and one.micro > self.base.micro)
        return sorted(alone, key=lambda one: -one.micro)


def estimate(what: WhatToEstimate, executor: Executor, observe: Callable[[Facts | Combination], None]) -> Estimation:
    """Ask for each combination in a process of its own.

    Args:
        what: the task and the device that is planned for.
        executor: runs the children on a CPU; stays the caller's to close.
        observe: is told the facts, and each combination as it is known.

    Raises:
        TaskError: the task cannot be loaded, or its step raises.
        SpaceError: an unknown technique or value in the space.
        NothingFits: no combination fits at a micro-batch of 1.
        StudyError: the storage that the user named cannot be read, or has no study of the task.
    """
    pace = Pace(0.0, None)
    space = load_space(what.space)
    options = SearchOptions(what.task, device="cpu", effective_batch=what.effective_batch)
    facts = _planned_for(what, inspect(options, executor, pace, runs_model=False))
    observe(facts)
    limit_bytes = what.limit_bytes or facts.device.memory_bytes
    try:
        study, calibration, uncalibrated = *_calibration(what, facts, executor, pace), None
    except _Uncalibrated as reason:
        study, calibration, uncalibrated = None, None, str(reason)
    asked = _options(what, facts, limit_bytes).model_copy(update={"calibration": calibration})
    found: list[Combination] = []
    choices = space.choices(facts)
    may_choose = any(choice.model_dump(exclude_defaults=True) for choice in choices.get("checkpointing", ()))
    for settings in _combinations(choices, facts):
        wanted = asked.model_copy(update={"settings": settings, "choose_blocks": may_choose and not found})
        request = _request(f"estimate-{len(found) + 1}", what, pace, wanted)
        one = Combination(settings, executor.ask(request))
        if not found:
            _check_base(one.outcome, what)
        found.append(one)
        observe(one)
    estimation = Estimation(what, facts, limit_bytes, tuple(found), calibration, study, uncalibrated or None)
    if not any(one.micro for one in found):
        raise NothingFits(_nearest_miss(estimation))
    return estimation


def _planned_for(what: WhatToEstimate, facts: Facts) -> Facts:
    if what.device == "cpu":
        return facts
    size = what.device_memory_bytes or what.budget_bytes or 0
    name = f"a CUDA device of {format_bytes(size)}" if size else "a CUDA device"
    card = Device(type="cuda", name=name, memory_bytes=size, capability=(8, 0), bf16=True)
    return facts.model_copy(update={"device": card})


def _options(what: WhatToEstimate, facts: Facts, limit_bytes: int) -> EstimateOptions:
    return EstimateOptions(
        target=what.device,
        limit_bytes=limit_bytes,
        reference_batch=facts.effective_batch,
        reference_micro=facts.micro_batch,
        is_held=facts.effective_batch_held,
        most=max(facts.effective_batch, min(facts.dataset_length or _MOST_MICRO, _MOST_MICRO)),
        largest_of=LARGEST_OF if facts.shapes_vary else None,
    )


def _combinations(choices: dict[str, tuple[Technique, ...]], facts: Facts) -> Iterator[Settings]:
    """The job as it stands, then each technique alone, then together: of those that change a step's tensors, since the
    others move a peak little, or not at all."""
    techniques = (technique for technique in TECHNIQUES.values() if "tensors" in technique.affects)
    rows = [technique.extremes(choices.get(technique.name, ())) for technique in techniques]
    together = (Settings(**{one.name: one for one in chosen}) for chosen in itertools.product(*filter(None, rows)))
    own = {"batch": Batch.reference(facts)}
    goes = (one for one in together if one.in_force(facts.precision).model_copy(update=own).conflict() is None)
    yield from sorted(dict.fromkeys([Settings(), *goes]), key=lambda one: len(one.model_dump(exclude_defaults=True)))


def _request(name: str, what: WhatToEstimate, pace: Pace, options: PredictOptions | EstimateOptions) -> PredictRequest:
    return PredictRequest(
        id=name,
        task=os.path.abspath(what.task),
        device="cpu",
        options=options,
        deadline_s=pace.deadline_s(0.0, spare_finalists=False),
        environment=own_thread_variables(),
    )


class _Uncalibrated(Exception):
    """Trials say nothing; the message says why, and is empty where there are none."""


def _calibration(what: WhatToEstimate, facts: Facts, executor: Executor, pace: Pace) -> tuple[str, Calibration]:
    """Hold what a search has measured against what would have been predicted of it.

    Returns:
        The study's name, and what was learned.

    Raises:
        _Uncalibrated: that is nothing.
        StudyError: the storage that the user named cannot be read, or has no study of the task.
    """
    study = _study(what, facts)
    alone = [
        (seen, measurement.peak.process)
        for settings, measurement in study.measured
        if not (seen := settings.as_predicted(study.facts)).data_loading.num_workers
        and settings.data_loading.cache == "none"  # an epoch that is kept in memory is no matter of the laws
    ]
    if not alone:
        raise _Uncalibrated(
            f"every trial of study {study.name} had loader workers or a cached epoch, which come on top"
        )
    asked = PredictOptions(
        settings=tuple(settings for settings, _ in alone),
        target=what.device,
        largest_of=LARGEST_OF if facts.shapes_vary else None,
        model_bytes=4 * facts.num_parameters,
        most_s=_MOST_CALIBRATING_S,
    )
    outcome = executor.ask(_request("calibrate", what, pace, asked))
    if not isinstance(outcome, Predicted):
        reason = first_line(failure(outcome))
        raise _Uncalibrated(f"the trials of study {study.name} could not be predicted: {reason}")
    rows = [
        (Interval(low=one.peak_bytes, value=one.peak_bytes, high=one.high_bytes), measured)
        for one, (_, measured) in zip(outcome.predictions, alone, strict=True)
        if one is not None and one.high_bytes is not None
    ]
    if not rows:
        raise _Uncalibrated(f"none of the trials of study {study.name} could be predicted")
    return study.name, learn_calibration(rows)


def _study(what: WhatToEstimate, facts: Facts) -> Finished:
    """The one whose trials were of this job, on this kind of device."""
    stem = Path(what.task).stem
    try:
        study = finished(what.storage or default_url(stem), stem, facts.fingerprint)
    except StudyError as error:
        if what.storage is not None:
            raise
        raise _Uncalibrated(str(error)) from None
    if study is None and what.storage is not None:
        raise StudyError(
            f"--storage {masked(what.storage)}: no study of {what.task} has measured anything there. "
            "Name the storage of a search, or leave it out."
        )
    if study is None:
        raise _Uncalibrated
    different = [name for name, before, now in _compared(study.facts, facts) if before != now]
    if different:
        raise _Uncalibrated(f"study {study.name} was of {', '.join(different)}")
    return study


def _compared(study: Facts, facts: Facts) -> Iterator[tuple[str, object, object]]:
    yield "another kind of device", study.device.type, facts.device.type
    yield "another torch", study.torch_version, facts.torch_version
    yield "another precision", study.precision, facts.precision
    yield "another dataset", (study.dataset_length, study.dataset_bytes), (facts.dataset_length, facts.dataset_bytes)
    if facts.device.type == "cpu":
        yield "another processor", study.device.name, facts.device.name
        yield "another number of threads", study.num_threads, facts.num_threads


def _check_base(outcome: Outcome, what: WhatToEstimate) -> None:
    """The job as it stands has to be known: a task that is wrong is wrong in every combination."""
    if isinstance(outcome, Estimated):
        return
    if isinstance(outcome, Failed) and not outcome.traceback:
        raise TaskError(outcome.message)
    raise TaskError(f"{what.task}: its memory cannot be estimated: {failure(outcome)}")


def _nearest_miss(found: Estimation) -> str:
    known = [(one.estimate, one.estimate.smallest, one.settings) for one in found.combinations if one.estimate]
    least, fit, settings = min(
        ((whole, fit, settings) for whole, fit, settings in known if fit is not None),
        key=lambda row: row[1].process.value,
    )
    changed = settings.model_dump(exclude_defaults=True)
    how = ", ".join(f"{name}: {row['kind']}" for name, row in changed.items()) or "the job as it stands"
    return (
        f"{found.what.task}: nothing fits within {format_bytes(found.limit_bytes)}, not even a micro-batch of "
        f"{fit.micro}. The nearest takes about {format_bytes(ceil_mib(fit.process.value))} ({how}), of which "
        f"{format_bytes(ceil_mib(least.base_bytes))} are no tensors. Allow that much, or a smaller model."
    )
