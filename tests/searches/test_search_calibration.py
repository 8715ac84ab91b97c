"""Calibrating estimates by a search's trials: by hand arithmetic, and from a study through to what is asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import optuna
import pytest
from answering import Answering
from screen import printed
from search_tables import FINGERPRINT, MIB, facts, options, run_search, table

from autotune.commands.calibrate import learn_calibration
from autotune.commands.estimate import estimate_task
from autotune.errors import StudyError
from autotune.estimates import Calibration, Estimate, EstimateOptions, Fit, Interval, Prediction
from autotune.report.estimate import as_json, explain
from autotune.results import WhatToEstimate
from autotune.searches.store.read_study import finished
from autotune.workers import Crashed, Estimated, Inspected, Predicted, TrialRequest
from autotune.workers.table import TableExecutor

URL = "sqlite:///.autotune/model.db"
WHAT = WhatToEstimate("model.py", 400 * MIB)


def interval(value, error=0.02):
    return Interval.around(round(value), error)


# Learning


def test_a_constant_and_a_share_are_found_where_trials_tell_them_apart():
    """Measured is 1.02 times predicted and 10 MiB: one of 200 MiB and one of 1000."""
    rows = [(interval(size * MIB, 0.001), round(1.02 * size * MIB + 10 * MIB)) for size in (200, 400, 700, 1000)]
    found = learn_calibration(rows)
    assert found.constant_bytes == pytest.approx(10 * MIB, rel=0.05)
    assert found.share == pytest.approx(0.02, rel=0.05)
    assert (found.widened, found.num_trials) == (1.0, 4)


def test_one_trial_is_half_believed_where_its_interval_is_as_wide_as_what_was_thought_before():
    """Constant and share have 3 % of the prediction each: together a deviation of 4.24 %. A trial whose own is as large
    moves both by half of what is off, in equal parts."""
    own = 1.645 * 0.03 * 2**0.5
    found = learn_calibration([(interval(1000 * MIB, own), 1100 * MIB)])
    assert found.constant_bytes == pytest.approx(25 * MIB, rel=1e-3)
    assert found.share == pytest.approx(0.025, rel=1e-3)


def test_trials_that_vary_more_than_their_intervals_widen_them():
    """Four trials, 10 % off either way, of intervals of 1.645 %: ten deviations; (4 + 4 * 100) / (4 + 4) = 7.1^2."""
    rows = [(interval(1000 * MIB, 0.01645), size * MIB) for size in (900, 1100, 900, 1100)]
    found = learn_calibration(rows)
    assert found.widened == pytest.approx(50.5**0.5, rel=1e-3)
    assert found.constant_bytes == pytest.approx(0, abs=MIB)


def test_what_was_learned_moves_a_prediction_and_widens_its_interval():
    learned = Calibration(constant_bytes=10.0, share=0.1, widened=2.0, num_trials=3)
    assert learned.of(Interval(low=90, value=100, high=130)) == Interval(low=100, value=120, high=180)


# From a study


def asks(request: TrialRequest) -> str:
    """A request's kind, or what it asks of a prediction."""
    return "estimate" if isinstance(request.options, EstimateOptions) else request.kind


class Says(Answering):
    """Predicts 50 MiB less than a search's table has it, and estimates nothing of note."""

    def __init__(self):
        self.facts, self.asked = facts(), []
        self.peaks = {row.settings.canonical(): row.peak_bytes[0] for row in table(facts())}

    def answer(self, request):
        self.asked.append(request)
        if request.kind == "inspect":
            return Inspected(facts=self.facts)
        if asks(request) == "predict":
            peaks = [self.peaks[settings.canonical()] - 50 * MIB for settings in request.options.settings]
            found = tuple(Prediction(peak_bytes=peak, high_bytes=round(peak * 1.001)) for peak in peaks)
            return Predicted(predictions=found)
        fit = Fit(micro=4, accumulate=1, tensors=interval(MIB), process=interval(MIB))
        return Estimated(
            estimate=Estimate(
                how="traced",
                base_bytes=MIB,
                largest=fit,
                smallest=None,
                surely=4,
                reference=fit,
                phase="backward",
                module="",
                fills=(),
                seconds=1.0,
            )
        )


pytestmark = pytest.mark.usefixtures("elsewhere")


def test_without_a_study_nothing_is_asked_and_none_is_made():
    executor = Says()
    found = estimate_task(WHAT, executor, lambda event: None)
    assert {asks(request) for request in executor.asked} == {"inspect", "estimate"}
    assert (found.calibration, found.study, as_json(found)["calibration"]) == (None, None, None)
    assert not Path(".autotune").exists()


@pytest.mark.medium
def test_a_searchs_trials_are_predicted_and_every_combination_is_told_what_was_learned():
    run_search(options(trials=6))
    executor = Says()
    found = estimate_task(WHAT, executor, lambda event: None)
    (predicted,) = (request for request in executor.asked if asks(request) == "predict")
    study = finished(URL, "model", FINGERPRINT)
    assert study is not None
    assert found.study == study.name == "model-1"
    assert list(predicted.options.settings) == [settings for settings, _ in study.measured]
    learned = found.calibration
    assert learned is not None
    assert learned.num_trials == len(study.measured) == 6
    assert learned.constant_bytes + learned.share * 400 * MIB == pytest.approx(50 * MIB, rel=0.1)
    assert {one.options.calibration for one in executor.asked if asks(one) == "estimate"} == {learned}
    assert as_json(found)["calibration"]["study"] == "model-1"
    said = printed(explain(found), 200)
    assert "process is calibrated by 6 trials of study model-1: +" in said


@pytest.mark.medium
@pytest.mark.parametrize(
    ("what", "known", "reason"),
    [
        (WHAT, {"fingerprint": "sha256:" + "b" * 64}, None),
        (WhatToEstimate("model.py", 400 * MIB, "cuda"), {}, "study model-1 was of another kind of device"),
        (WHAT, {"torch_version": "2.12.0", "dataset_length": 7}, "study model-1 was of another torch, another dataset"),
        (WHAT, {"num_threads": 64}, "study model-1 was of another number of threads"),
    ],
)
def test_trials_of_another_job_say_nothing_and_that_is_said(what, known, reason):
    run_search(options(trials=2))
    executor = Says()
    executor.facts = facts(**known)
    found = estimate_task(what, executor, lambda event: None)
    assert (found.calibration, found.uncalibrated) == (None, reason)
    assert {asks(request) for request in executor.asked} == {"inspect", "estimate"}
    words = printed(explain(found), 300)
    assert ("calibrated" in words) == (reason is not None)
    assert (reason or "") in words


def test_trials_that_cannot_be_predicted_are_told():
    run_search(options(trials=2))

    class Crashes(Says):
        def answer(self, request):
            if asks(request) != "predict":
                return super().answer(request)
            return Crashed(message="SIGSEGV")

    found = estimate_task(WHAT, Crashes(), lambda event: None)
    assert found.uncalibrated == "the trials of study model-1 could not be predicted: SIGSEGV"


def test_trials_with_loader_workers_are_left_out():
    """What a worker takes is a guess, and is not in an estimate."""
    known = facts(loader_options={"num_workers": 2})
    run_search(options(trials=2), known)
    executor = Says()
    executor.facts = known
    found = estimate_task(WHAT, executor, lambda event: None)
    assert "had loader workers" in found.uncalibrated


@pytest.mark.medium
def test_a_study_that_is_being_written_is_read():
    during: list[int] = []

    class Reads(TableExecutor):
        def _answer(self, request):
            study = finished(URL, "model", FINGERPRINT)
            during.append(len(study.measured) if study else 0)
            return super()._answer(request)

    run_search(options(trials=3), executor=Reads(facts(), table(facts())))
    assert max(during) == 3


@pytest.mark.medium
def test_a_study_without_measurements_gives_way_to_the_one_before():
    run_search(options(trials=2))
    begun = optuna.create_study(storage=URL, study_name="model-2")
    begun.set_user_attr("fingerprint", FINGERPRINT)  # killed before its facts were written
    found = finished(URL, "model", FINGERPRINT)
    assert (found.name, len(found.measured)) == ("model-1", 2)


@pytest.mark.parametrize(("content", "reason"), [("", None), ("not a database", "not a readable study")])
def test_a_file_that_is_no_study_ends_nothing_unless_it_was_named(content, reason):
    path = Path(".autotune/model.db")
    path.parent.mkdir()
    path.write_text(content)
    found = estimate_task(WHAT, Says(), lambda event: None)
    assert found.calibration is None
    assert (found.uncalibrated is None) == (reason is None)
    assert (reason or "") in (found.uncalibrated or "")
    assert path.read_text() == content
    with pytest.raises(StudyError):
        estimate_task(dataclasses.replace(WHAT, storage=URL), Says(), lambda event: None)


def test_a_named_storage_without_the_task_is_an_error():
    with pytest.raises(StudyError, match="has measured anything there"):
        estimate_task(dataclasses.replace(WHAT, storage="sqlite:///typo.db"), Says(), lambda event: None)
    assert not Path("typo.db").exists()
