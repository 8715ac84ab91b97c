"""The search over a table: what is asked, in which order, and what is written."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from search_tables import BF16, MIB, configurations, every, facts, options, peak, row, run_search, speed

from autotune.errors import Interrupted, NothingFits, PlanError, SpaceError, TaskError
from autotune.estimates import Prediction
from autotune.measure import Parity
from autotune.measure.measurement import Quality
from autotune.plan import load_plan
from autotune.pruning import Record
from autotune.searches.driver import search
from autotune.searches.events import (
    PredictionEnded,
    PredictionStarted,
    SearchStarted,
    Stopped,
    TaskRead,
    TrialEnded,
    TrialStarted,
    Warned,
)
from autotune.searches.options import Drop
from autotune.searches.requests import PARITY_LIMITS
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.precision import Precision
from autotune.techniques.support.facts import Lengths
from autotune.workers import Crashed, Failed, Measured, NonFinite, Outcome, OutOfMemory, TimedOut, TrialRequest
from autotune.workers.table import Row, TableExecutor

REFERENCE = Settings(batch=Batch(micro=64))
FASTEST = Settings(batch=Batch(micro=64), precision=Precision(kind="bf16"), allocator=Allocator(kind="tcmalloc"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(tmp_path)
    if "study" not in request.fixturenames:
        request.getfixturevalue("in_memory")


def differences(one: Settings, other: Settings) -> int:
    return sum(getattr(one, name) != getattr(other, name) for name in Settings.model_fields)


@pytest.fixture
def study() -> Callable[[], optuna.Study]:
    """Loads what a search has kept."""
    return lambda: optuna.load_study(study_name="model-1", storage="sqlite:///.autotune/model.db")


def test_the_plan_that_is_written_is_the_plan_that_is_returned():
    run = run_search(options())
    assert load_plan("plan.yaml") == run.plan


def test_without_a_budget_the_fastest_configuration_wins():
    run = run_search(options())
    assert run.plan.settings == FASTEST
    assert run.plan.gain.speed == round(speed(FASTEST) / speed(REFERENCE), 3)


@pytest.mark.parametrize("sampler", ["gain", "random", "tpe"])
def test_the_only_configuration_of_a_space_is_tried_though_nothing_in_it_is_chosen(sampler):
    Path("one.yaml").write_text("{schema: autotune/space@1, precision: [{kind: bf16}]}")
    assert run_search(options(space="one.yaml", sampler=sampler)).measured == [REFERENCE, BF16]


def test_the_first_trial_is_the_reference_without_enforcement():
    request = run_search(options(budget=400 * MIB)).executor.requests[1]
    assert request.plan.settings == REFERENCE
    assert request.options.enforce is False
    assert request.options.plain_loop is True
    assert request.options.reference_losses is None


JOB = {"micro_batch": 8, "precision": "bf16"}
"""A job that trains as 8 x 8 in bf16."""


def run_job(**changes):
    """A search of that job: what is at the user's own is in bf16."""
    known = facts(**JOB)
    rows = [
        row(settings, samples_per_s=(speed(own),), peak_bytes=(peak(own),), losses=(3.0,))
        for settings in configurations(known)
        for own in [settings.in_force("bf16")]
    ]
    return run_search(options(**changes), known=known, rows=rows)


def test_the_reference_is_the_job_that_the_task_states():
    """Trial 0 is 8 x 8 at the job's own precision; gain, budget and losses are against it; the plan says it all."""
    run = run_job(budget=400 * MIB, trials=30, sampler="random")
    job = Settings(batch=Batch(micro=8, accumulate=8))
    assert run.measured[0] == job
    stated = job.in_force("bf16")
    assert run.plan.reference.samples_per_s.value == pytest.approx(speed(stated), rel=1e-4)
    assert run.plan.reference.fits
    assert run.plan.gain.speed == pytest.approx(speed(run.plan.settings) / speed(stated), abs=1e-3)
    assert {settings.batch.num_samples for settings in run.measured} == {64}
    assert {settings.precision.kind for settings in run.measured} == {"default", "fp32"}
    assert run.plan.settings.precision.kind == "bf16"
    assert load_plan("plan.yaml").settings.precision.kind == "bf16"


def test_losses_are_compared_as_rounded_where_the_job_rounds():
    """Whatever is changed: its own sums come in another order."""
    requests = [request for request in run_job(trials=6).executor.requests if request.kind == "measure"]
    assert {request.options.parity_limit for request in requests} == {PARITY_LIMITS["rounding"]}
    assert {request.options.parity_batch for request in requests if request.options.parity_batch} == {64}


def test_without_predictions_the_first_guess_does_not_leave_the_jobs_bf16():
    """fp32 is believed to be slower than what the job runs in."""
    assert run_job(trials=2).measured[1].precision == Precision()


def test_a_job_whose_split_changes_the_gradient_keeps_its_micro_batch():
    known = facts(**JOB, split_error=0.09)
    run = run_search(options(trials=40, sampler="random"), known=known)
    assert {settings.batch for settings in run.measured} == {Batch(micro=8, accumulate=8)}


def test_a_model_with_an_autocast_of_its_own_is_offered_no_other():
    run = run_search(options(trials=40, sampler="random"), known=facts(own_autocast=True))
    assert {settings.precision for settings in run.measured} == {Precision()}
    assert len({settings.batch for settings in run.measured}) == 7
    assert "precision" not in load_plan("plan.yaml").settings.model_dump(exclude_defaults=True)


def test_without_predictions_the_second_trial_is_every_most_promising_choice_that_costs_no_time():
    assert run_search(options()).measured[1] == FASTEST


def test_later_trials_are_enforced_and_compared_with_the_references_losses():
    rows = [row(REFERENCE, losses=(3.0, 2.0))]
    run = run_search(options(budget=900 * MIB), rows=rows)
    later = [request for request in run.executor.requests if request.kind == "measure"][1]
    assert later.options.enforce is True
    assert later.options.plain_loop is False
    assert later.options.reference_losses == (3.0, 2.0)
    assert later.options.parity_batch == 64
    assert later.options.parity_limit == PARITY_LIMITS["rounding"]


def test_without_predictions_the_largest_batch_that_fits_is_found_by_bisection():
    """bf16 and tcmalloc: 64 samples need 497 MiB, 4 need 190, 16 need 252, 32 need 333."""
    run = run_search(options(budget=330 * MIB))
    tried = [s.batch.micro for s in run.measured if s.precision.kind == "bf16" and s.checkpointing.kind == "none"]
    assert tried[:4] == [64, 4, 16, 32]


def test_within_a_budget_the_best_of_all_that_fit_is_found():
    limit = 330 * MIB
    run = run_search(options(budget=limit, trials=16))
    fitting = [speed(s) for s in configurations(facts()) if peak(s) * 1.03 <= limit]
    assert run.plan.measured.samples_per_s.value == pytest.approx(max(fitting), rel=1e-4)


def test_no_configuration_is_measured_twice():
    measured = run_search(options(trials=25, sampler="tpe")).measured
    assert len(measured) == 25
    assert len({settings.canonical() for settings in measured}) == 25


def test_trials_count_the_reference_and_not_the_finalists():
    run = run_search(options(trials=5))
    assert len(run.measured) == 5
    assert run.plan.search.trials == 5
    assert run.again, "measured on top, in fresh interpreters"


def test_a_search_ends_when_every_configuration_has_been_measured():
    Path("space.yaml").write_text("schema: autotune/space@1\nprecision: auto\nallocator: auto\n")
    run = run_search(every(trials=100))
    assert len(run.measured) == 4
    assert run.seen(Stopped) == [
        Stopped("every configuration that may be faster has been measured, or is known not to fit")
    ]
    assert run.seen(SearchStarted) == [SearchStarted("model-1", 4, 4)]


def test_a_larger_micro_batch_than_one_that_did_not_fit_is_not_tried():
    """One micro-batch size is over the budget; with everything else equal, no larger split one may follow it."""
    run = run_search(options(budget=300 * MIB, trials=25))
    seen: list[Settings] = []
    for settings in run.measured:
        for other in seen:
            over = peak(other) * 1.03 > 300 * MIB and other.batch.micro < settings.batch.micro
            split = other.batch.accumulate == 1 or settings.batch.accumulate > 1
            assert not (over and split and other.model_copy(update={"batch": settings.batch}) == settings)
        seen.append(settings)


@pytest.mark.parametrize("seed", range(4))
def test_padded_samples_that_did_not_fit_say_nothing_of_longer_rows_without_padding(seed):
    """In any order: 8 padded samples of 10 tokens are over the budget, and a row of 160 tokens is not."""
    padded = Batch(micro=8, accumulate=8, tokens=80)
    row_of_160 = Batch(micro=16, accumulate=4, tokens=160, packed=True)
    Path("space.yaml").write_text(
        "schema: autotune/space@1\nbatch: [{micro: 64}, {micro: 8, accumulate: 8, tokens: 80}, "
        "{micro: 16, accumulate: 4, tokens: 160, packed: true}]\n"
    )
    lengths = Lengths(read=500, samples=500, longest=10, places=((1, 2),), in_tokens=True)
    known = facts(lengths=lengths, no_packing=None)
    over = row(Settings(batch=padded), peak_bytes=(2000 * MIB,))
    run = run_search(every(budget=1000 * MIB, trials=9, seed=seed), known, [over])
    assert {one.batch for one in run.measured} == {Batch(micro=64), padded, row_of_160}


def test_a_reference_outside_the_space_is_measured_all_the_same():
    Path("space.yaml").write_text("schema: autotune/space@1\nprecision: [{kind: bf16}]\nallocator: auto\n")
    run = run_search(options())
    assert run.measured[0] == REFERENCE
    assert {s.precision.kind for s in run.measured[1:]} == {"bf16"}
    assert len(run.measured) == 3


@pytest.mark.medium
def test_every_trial_has_every_constraint_in_one_order(study):
    run_search(options(budget=330 * MIB, trials=12, sampler="random"))
    trials = study().get_trials()
    assert len(trials) >= 12
    for trial in trials:
        assert list(trial.constraints) == ["failure", "leak", "memory", "parity", "quality"]


def test_the_memory_constraint_is_the_log_of_the_peak_over_the_budget(study):
    with pytest.raises(NothingFits):
        run_search(options(budget=330 * MIB, trials=1, margin=0.05), rows=[row(REFERENCE, peak_bytes=(660 * MIB,))])
    assert study().trials[0].constraints["memory"] == pytest.approx(math.log(2 * 1.05))
    assert study().trials[0].value == pytest.approx(math.log(speed(REFERENCE)))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("outcome", "broken"),
    [
        (OutOfMemory(peak_bytes=10**9, message="the watchdog"), "memory"),
        (NonFinite(step=3), "failure"),
        (TimedOut(deadline_s=60), "failure"),
        (Crashed(message="Segmentation fault (SIGSEGV)"), "failure"),
        (Failed(message="ValueError: no"), "failure"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_trial_that_ends_badly_breaks_one_constraint_and_the_search_goes_on(outcome: Outcome, broken: str, study):
    run = run_search(options(budget=900 * MIB), rows=[row(FASTEST, outcome=outcome)])
    fastest = FASTEST.model_dump(mode="json", exclude_defaults=True)
    (trial,) = [t for t in study().trials if t.user_attrs.get("settings") == fastest]
    assert trial.state == optuna.trial.TrialState.COMPLETE
    assert [key for key, value in trial.constraints.items() if value > 0] == [broken]
    assert run.plan.settings != FASTEST


def test_a_configuration_that_strays_is_not_used():
    strays = row(FASTEST, parity=Parity(losses=(1.0, 9.0), deviation=0.8, strayed_at=2))
    run = run_search(options(), rows=[strays])
    assert run.plan.settings != FASTEST
    (ended,) = [e for e in run.seen(TrialEnded) if e.settings == FASTEST]
    assert not ended.feasible


def test_a_configuration_that_leaks_is_not_used():
    run = run_search(options(), rows=[row(FASTEST, leak_bytes_per_step=5e6)])
    assert run.plan.settings != FASTEST


def test_events_tell_the_story_in_order():
    run = run_search(options(trials=2))
    kinds = [type(event) for event in run.events]
    assert kinds[:4] == [TaskRead, SearchStarted, TrialStarted, TrialEnded]
    assert kinds[4:8] == [PredictionStarted, PredictionEnded] * 2  # of what trades nothing, then of the rest
    assert kinds[8:10] == [TrialStarted, TrialEnded]
    assert [event.number for event in run.seen(TrialEnded)] == [0, 1]
    assert [event.is_best for event in run.seen(TrialEnded)] == [True, True]


def test_a_reference_over_the_budget_is_said_and_never_chosen():
    run = run_search(options(budget=600 * MIB))
    assert any("the reference is over the budget" in event.message for event in run.seen(Warned))
    assert not run.plan.reference.fits
    assert any("the reference is over the budget" in note for note in run.plan.notes)
    assert run.plan.gain.speed > 1


def test_a_reference_over_the_budget_teaches_how_fast_others_are(study):
    """It takes 840 MiB of 300, so that its batch is not among those that may fit."""
    run_search(options(budget=300 * MIB, trials=2), predict=lambda settings: Prediction(peak_bytes=peak(settings)))
    first = study().trials[1]
    forecast = first.user_attrs["forecast"]["samples_per_s"]
    assert forecast["low"] < math.exp(first.value) < forecast["high"] < 100 * forecast["low"]


def test_a_reference_that_fits_nowhere_leaves_the_gain_null_with_a_reason():
    run = run_search(
        options(budget=600 * MIB),
        rows=[row(REFERENCE, outcome=OutOfMemory(peak_bytes=10**9, message="the kernel ended it"))],
    )
    assert run.plan.reference is None
    assert run.plan.gain.speed is None
    assert "out of memory" in run.plan.gain.reason


def test_without_the_references_losses_the_first_exact_configuration_stands_in():
    rows = [row(settings, losses=(7.0,)) for settings in configurations(facts())]
    rows.append(row(REFERENCE, outcome=OutOfMemory(peak_bytes=10**9, message="no")))
    requests = run_search(options(trials=8), rows=rows).executor.requests
    given = [request.options.reference_losses for request in requests if request.kind == "measure"]
    assert given[0] is None
    assert given[-1] == (7.0,)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (
            Failed(message="ValueError: boom", traceback='  File "model.py", line 3\nValueError: boom'),
            'File "model.py", line 3',
        ),
        (NonFinite(step=1), "not finite at optimizer step 1"),
        (TimedOut(deadline_s=60, message="in model.py line 9"), "did not end within 60 s. in model.py line 9"),
        (
            Crashed(message="Segmentation fault (SIGSEGV)", output="Fatal Python error"),
            r"\(SIGSEGV\)\n\nIts last output:\nFatal Python error",
        ),
    ],
    ids=["failed", "nan", "hang", "segfault"],
)
def test_a_job_that_does_not_run_as_it_stands_ends_the_search_with_its_own_words(outcome: Outcome, words: str):
    with pytest.raises(TaskError, match=words) as caught:
        run_search(options(), rows=[row(REFERENCE, outcome=outcome)])
    assert caught.value.exit_code == 2
    assert not Path("plan.yaml").exists()


def test_a_job_that_leaks_as_it_stands_ends_the_search():
    with pytest.raises(TaskError, match="leaks about 5 MiB each step"):
        run_search(options(), rows=[row(REFERENCE, leak_bytes_per_step=5 * MIB)])


class Uninspectable(TableExecutor):
    """Answers an inspection with a failure."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(facts(), [])
        self.outcome = outcome

    def _answer(self, request: TrialRequest) -> Outcome:
        return self.outcome


def test_a_task_that_cannot_be_loaded_is_answered_with_our_message_alone():
    with pytest.raises(TaskError, match=r"^model.py: no such file\.$"):
        run_search(options(), executor=Uninspectable(Failed(message="model.py: no such file.")))


def test_a_task_that_raises_when_it_is_inspected_is_answered_with_its_traceback():
    failed = Failed(message="ZeroDivisionError: division by zero", traceback="Traceback: model.py line 1")
    with pytest.raises(TaskError, match=r"cannot be inspected: ZeroDivisionError.*\n\nTraceback: model.py line 1"):
        run_search(options(), executor=Uninspectable(failed))


def test_a_traceback_that_a_script_has_printed_too_is_said_once():
    traceback = "Traceback (most recent call last):\n  File \"train.py\", line 1\nImportError: No module named 'six'\n"
    failed = Failed(
        message="ImportError: No module named 'six'", traceback=traceback, output=f"reads\n{traceback}is gone\n"
    )
    with pytest.raises(TaskError, match="the script cannot be inspected: ImportError") as caught:
        run_search(options(command=(sys.executable, "train.py")), executor=Uninspectable(failed))
    assert str(caught.value).count("Traceback") == 1
    assert str(caught.value).endswith("No module named 'six'\n\nIts last output:\nreads\n\nis gone")


def test_nothing_fits_names_the_nearest_miss_and_the_budget_that_admits_it():
    """The smallest of all is bf16 under tcmalloc with every block recomputed, at a micro-batch of one."""
    rows = "batch: [{micro: 64}, {micro: 1, accumulate: 64}]\nprecision: auto\nallocator: auto\n"
    Path("space.yaml").write_text(
        f"schema: autotune/space@1\n{rows}checkpointing: [{{kind: none}}, {{kind: blocks}}]\n"
    )
    smallest = min(peak(s) for s in configurations(facts()))
    with pytest.raises(NothingFits) as caught:
        run_search(options(budget=64 * MIB, trials=50))
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert f"Nearest miss: {math.ceil(smallest / MIB)} MiB with batch {{micro: 1, accumulate: 64}}" in message
    assert f"--budget {math.ceil(math.ceil(smallest * 1.03) / MIB)}MiB would admit it" in message
    assert "--allow-split" not in message


def test_nothing_fits_says_where_a_split_would_help():
    with pytest.raises(NothingFits, match=r"smaller micro-batches are not tried.*--allow-split"):
        run_search(options(budget=64 * MIB), known=facts(split_error=0.09))


def test_if_only_the_reference_can_be_used_the_plan_is_the_reference():
    rows = [row(s, outcome=Failed(message="no")) for s in configurations(facts()) if s != REFERENCE]
    run = run_search(options(), rows=rows)
    assert run.plan.settings == REFERENCE
    assert run.plan.gain.speed == 1.0
    assert run.plan.measured == run.plan.reference


def test_a_batch_that_changes_the_optimization_is_noted():
    known = facts(effective_batch=8, effective_batch_held=False, effective_batch_assumed=True)
    notes = "\n".join(run_search(options(), known=known).plan.notes)
    assert "the reference's 8 is assumed" in notes
    assert "learning rate" in notes


def test_a_lossy_choice_is_named():
    known = facts(split_error=0.09, allow_split=True)
    run = run_search(options(budget=280 * MIB), known=known)
    assert run.plan.settings.batch.accumulate > 1
    assert any("batch is lossy" in note for note in run.plan.notes)


def test_a_plan_has_what_was_decided_as_its_settings_were_applied(tmp_path):
    """The record of what pruning keeps, which lies beside the plan."""
    Path("space.yaml").write_text("schema: autotune/space@1\npruning: [{kind: none}, {kind: structured}]\n")
    asked = REFERENCE.model_copy(update={"pruning": Pruning(kind="structured")})
    record = Record("of", ((0,),), {}, {})
    kept = {"kind": "structured", "record": record.hash, "kept": record.packed()}
    applied = asked.model_copy(update={"pruning": Pruning(**kept)})
    quality = (Quality(value=90.0),)
    reference = row(REFERENCE, quality=quality)
    measurement = row(REFERENCE, samples_per_s=(1000.0,), quality=quality).outcome_at(0, 0).measurement
    fast = Row(settings=asked, outcome=Measured(measurement=measurement, applied=applied))
    again = Row(settings=applied, outcome=Measured(measurement=measurement))
    judged = options(max_quality_drop=Drop(1.0, is_share=False))
    run = run_search(judged, known=facts(evaluates=True), rows=[reference, fast, again])
    assert run.plan.settings == applied
    assert load_plan("plan.yaml") == run.plan


def test_what_the_space_names_and_cannot_be_had_is_said():
    Path("space.yaml").write_text("schema: autotune/space@1\nprecision: [{kind: fp32}, {kind: fp16}]\n")
    said = [event.message for event in run_search(options()).seen(Warned)]
    assert any("precision" in message and "CUDA" in message for message in said)


def test_what_inspection_warns_of_is_passed_on():
    run = run_search(options(trials=1), known=facts(warnings=("the model is in eval mode",)))
    assert Warned("the model is in eval mode") in run.events


def test_an_output_that_cannot_be_written_is_said_before_anything_runs():
    Path("taken").write_text("")
    executor = TableExecutor(facts(), [])
    with pytest.raises(PlanError, match=r"cannot be written"):
        run_search(options(output=Path("taken/plan.yaml")), executor=executor)
    assert executor.requests == []


def test_an_output_that_is_a_folder_is_refused():
    with pytest.raises(PlanError, match="it is a folder"):
        run_search(options(output=Path(".")))


def test_an_unknown_space_is_said_before_anything_runs():
    executor = TableExecutor(facts(), [])
    with pytest.raises(SpaceError):
        search(options(space="fast"), executor, lambda event: None, threading.Event())
    assert executor.requests == []


class StopsAfter(TableExecutor):
    """Sets the stop flag as the n-th measurement is asked for, like a Ctrl-C during it."""

    def __init__(self, stop: threading.Event, after: int) -> None:
        super().__init__(facts(), [row(settings) for settings in configurations(facts())])
        self.stop, self.after = stop, after

    def _answer(self, request: TrialRequest) -> Outcome:
        if request.kind == "measure" and len([r for r in self.requests if r.kind == "measure"]) == self.after:
            self.stop.set()
        return super()._answer(request)


def test_an_interrupted_search_writes_the_best_so_far_and_says_that_it_was_interrupted():
    stop = threading.Event()
    run = run_search(options(), executor=StopsAfter(stop, after=2), stop=stop)
    assert len(run.measured) == 3
    assert run.again == []
    assert load_plan("plan.yaml").settings == FASTEST
    assert run.plan.search.stopped == "interrupted"
    assert run.plan.measured.samples_per_s.repeats == 1
    assert any("measured once, during the search" in note for note in run.plan.notes)


def test_an_interruption_before_anything_usable_keeps_the_trials_and_writes_no_plan():
    stop = threading.Event()
    with pytest.raises(Interrupted, match="1 trials are kept") as caught:
        run_search(options(budget=64 * MIB), executor=StopsAfter(stop, after=0), stop=stop)
    assert caught.value.exit_code == 130
    assert not Path("plan.yaml").exists()


def test_an_interruption_while_memory_is_predicted_writes_what_is_known_by_then():
    """The prediction is cut off, as what ends it does: it is not worth waiting for, and is no failure."""
    stop = threading.Event()

    class StopsPredicting(TableExecutor):
        def _answer(self, request: TrialRequest) -> Outcome:
            if request.kind == "predict":
                stop.set()
                self.close()
            return super()._answer(request)

    executor = StopsPredicting(facts(), [row(settings) for settings in configurations(facts())])
    run = run_search(options(), executor=executor, stop=stop)
    assert run.plan.search.stopped == "interrupted"
    assert len(run.measured) == 1
    assert run.seen(Warned) == []


def test_several_slots_are_kept_busy_without_measuring_anything_twice():
    executor = TableExecutor(facts(), [row(s) for s in configurations(facts())], num_slots=4)
    measured = run_search(options(trials=20, sampler="tpe"), executor=executor).measured
    assert len({settings.canonical() for settings in measured}) == len(measured) == 20


@pytest.mark.medium
@pytest.mark.parametrize("sampler", ["gp", "tpe", "random"])
def test_optunas_samplers_run_with_infeasible_and_failed_trials(sampler: str):
    rows = [row(FASTEST, outcome=Crashed(message="no"))]
    run = run_search(options(sampler=sampler, trials=14, budget=330 * MIB), rows=rows)
    assert run.plan.search.sampler == sampler
    assert len(run.measured) == 14


@pytest.mark.medium
def test_each_trials_output_is_kept_in_a_log_of_its_own_with_why_it_failed(study):
    run_search(options(), rows=[row(FASTEST, outcome=Failed(message="no", output="x" * 10_000))])
    assert Path(".autotune/model-1/trial-001.log").read_text() == "x" * 10_000 + "\nno\n"
    stored = [t.user_attrs["outcome"] for t in study().trials if t.user_attrs.get("number") == 1]
    assert len(json.dumps(stored[0])) < 5000


def test_checkpointing_is_not_among_the_first_guesses_where_the_reference_fits():
    assert run_search(options(trials=2)).measured[1].checkpointing == Checkpointing()


def predict(settings: Settings) -> Prediction:
    """What the table will say of memory, 2 % too low; work is what the memory model would count."""
    work = 1 + (0.33 / settings.checkpointing.every if settings.checkpointing.kind == "blocks" else 0.0)
    peak_bytes = round(peak(settings) / 1.02)
    return Prediction(peak_bytes=peak_bytes, flops_per_sample=1e9 * work, bytes_per_sample=1e6 * work)


@pytest.mark.parametrize("limit", [280 * MIB, 330 * MIB, 900 * MIB])
def test_with_predictions_a_dozen_trials_find_the_best_of_all_that_fit_and_few_are_over(limit: int):
    run = run_search(options(budget=limit, trials=24), predict=predict)
    fitting = [speed(s) for s in configurations(facts()) if peak(s) * 1.03 <= limit]
    assert run.plan.measured.samples_per_s.value == pytest.approx(max(fitting), rel=0.01)
    assert len(run.measured) <= 12
    assert sum(peak(settings) * 1.03 > limit for settings in run.measured[1:]) <= 2


def test_a_search_that_expects_no_more_stops_and_says_so_in_the_plan():
    run = run_search(options(budget=330 * MIB, trials=60), predict=predict)
    (stopped,) = run.seen(Stopped)
    assert re.fullmatch(r"stopped after \d+ trials: another is expected to gain [01]\.\d% at most", stopped.reason)
    assert run.plan.search.stopped == stopped.reason
    assert run.plan.search.trials == len(run.measured) < 20


def test_several_slots_end_together_and_nothing_is_started_once_no_more_is_expected():
    executor = TableExecutor(facts(), [row(s) for s in configurations(facts())], num_slots=3, predict=predict)
    run = run_search(options(budget=330 * MIB, trials=60), executor=executor)
    assert len({settings.canonical() for settings in run.measured}) == len(run.measured) < 24


@pytest.mark.medium
def test_without_predictions_the_best_is_found_by_what_trials_teach():
    limit = 330 * MIB
    run = run_search(options(budget=limit, trials=24))
    fitting = [speed(s) for s in configurations(facts()) if peak(s) * 1.03 <= limit]
    assert run.plan.measured.samples_per_s.value == pytest.approx(max(fitting), rel=0.01)
