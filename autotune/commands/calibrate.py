"""Calibrates an estimate by the trials of a search of the same task."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..errors import StudyError
from ..estimates import Calibration, CheapestOptions, EstimateOptions, Interval, PredictOptions
from ..estimates.cards import on_device
from ..results import WhatToEstimate
from ..script.command import own_batch
from ..searches.requests import failure, largest_of, started
from ..searches.store.read_study import Stored, finished
from ..searches.store.storage import default_url
from ..searches.store.url import masked
from ..searches.time_budget import TimeBudget
from ..techniques import Facts
from ..workers import Executor, Predicted, PredictRequest
from ..workers.trial.traces import first_line

_MOST_CALIBRATING_S = 60.0
"""Seconds after which no further memory model is traced for trials; those of a search are kept on disk."""
_CONSTANT, _SHARE = 0.03, 0.03
"""Prior standard deviations of the correction: of its constant, as a share of the mean prediction, and of its share of
each prediction."""
_ONE_IN_TWENTY = 1.645
"""Standard deviations to the 95th percentile of a normal distribution."""
_WEIGHT = 4.0
"""Weight of the stated intervals, in trials, against the variance that trials showed."""


class Uncalibrated(Exception):
    """No trial can be used; the message says why, and is empty where there are none."""


def calibrate(
    what: WhatToEstimate, facts: Facts, executor: Executor, time_budget: TimeBudget
) -> tuple[str, Calibration]:
    """Compare the measured trials of the task's newest study with predictions of them, and learn the correction.

    Returns:
        The study's name, and what was learned.

    Raises:
        Uncalibrated: no trial can be used.
        StudyError: the storage that the user named cannot be read, or has no study of the task.
    """
    study = _study(what, facts)
    alone = [
        (seen, measurement.training_bytes)
        for settings, measurement in study.measured
        if not (seen := settings.as_predicted(study.record.facts)).data_loading.num_workers
        and settings.data_loading.cache == "none"  # an epoch that is kept in memory is no matter of a memory model
    ]
    if not alone:
        raise Uncalibrated(f"every trial of study {study.name} had loader workers or a cached epoch, which come on top")
    asked = PredictOptions(
        settings=tuple(settings for settings, _ in alone),
        **on_device(facts.device, bool(facts.conv_dims), facts.tries_kernels),
        largest_of=largest_of(facts),
        model_bytes=4 * facts.num_parameters,
        most_s=_MOST_CALIBRATING_S,
    )
    outcome = executor.ask(predict_request("calibrate", what, time_budget, asked))
    if not isinstance(outcome, Predicted):
        reason = first_line(failure(outcome))
        raise Uncalibrated(f"the trials of study {study.name} could not be predicted: {reason}")
    rows = [
        (Interval(low=one.peak_bytes, value=one.peak_bytes, high=one.high_bytes), measured)
        for one, (_, measured) in zip(outcome.predictions, alone, strict=True)
        if one is not None and one.high_bytes is not None
    ]
    if not rows:
        raise Uncalibrated(f"none of the trials of study {study.name} could be predicted")
    return study.name, learn_calibration(rows)


def predict_request(
    name: str,
    what: WhatToEstimate,
    time_budget: TimeBudget,
    options: PredictOptions | CheapestOptions | EstimateOptions,
) -> PredictRequest:
    """A request to predict in a process of its own; for a script, in its own."""
    batch = own_batch(what.command, what.effective_batch) if what.command is not None else None
    return PredictRequest(
        id=name,
        task=os.path.abspath(what.task),
        device="cuda" if what.command is not None and what.is_here else "cpu",
        options=options,
        deadline_s=time_budget.deadline_s(0.0, spare_finalists=False),
        **started(what.command, batch, what.scratch),
    )


def _study(what: WhatToEstimate, facts: Facts) -> Stored:
    """The newest study of this job, on this kind of device."""
    stem = Path(what.task).stem
    try:
        study = finished(what.storage or default_url(stem), stem, facts.fingerprint)
    except StudyError as error:
        if what.storage is not None:
            raise
        raise Uncalibrated(str(error)) from None
    if study is None and what.storage is not None:
        raise StudyError(
            f"--storage {masked(what.storage)}: no study of {what.task} has measured anything there. "
            "Name the storage of a search, or leave it out."
        )
    if study is None:
        raise Uncalibrated
    different = [name for name, before, now in _compared(study.record.facts, facts) if before != now]
    if different:
        raise Uncalibrated(f"study {study.name} was of {', '.join(different)}")
    return study


def _compared(study: Facts, facts: Facts) -> Iterator[tuple[str, object, object]]:
    yield "another kind of device", study.device.type, facts.device.type
    yield "another torch", study.torch_version, facts.torch_version
    yield "another precision", study.precision, facts.precision
    yield "another dataset", (study.dataset_length, study.dataset_bytes), (facts.dataset_length, facts.dataset_bytes)
    if facts.device.type == "cpu":
        yield "another processor", study.device.name, facts.device.name
        yield "another number of threads", study.num_threads, facts.num_threads


def learn_calibration(rows: Sequence[tuple[Interval, int]]) -> Calibration:
    """Fit a constant and a share by which measured peaks exceed predictions: a linear regression with normal priors,
    each trial weighted by its own interval.

    Args:
        rows: of each trial, the process as it was predicted and its measured peak, bytes; at least one.

    Source: Bishop 2006, Pattern Recognition and Machine Learning, eq. 3.50 and 3.51.
    """
    predicted = np.array([float(interval.value) for interval, _ in rows])
    deviations = np.array([float(interval.high - interval.value) for interval, _ in rows]) / _ONE_IN_TWENTY
    off = np.array([float(measured) for _, measured in rows]) - predicted
    prior = 1 / np.array([_CONSTANT * predicted.mean(), _SHARE]) ** 2
    design = np.column_stack([np.ones(len(rows)), predicted]) / deviations[:, None]
    coefficients = np.linalg.solve(np.diag(prior) + design.T @ design, design.T @ (off / deviations))
    left = off / deviations - design @ coefficients
    variance = (_WEIGHT + left @ left) / (_WEIGHT + len(rows))
    constant, share = map(float, coefficients)
    return Calibration(
        constant_bytes=constant, share=share, widened=max(1.0, float(np.sqrt(variance))), num_trials=len(rows)
    )
