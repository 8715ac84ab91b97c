"""A search of a script: what each trial is started with, and what is left out and said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from search_tables import MIB, REFERENCE, SMALL, configurations, every, facts, options, row, run_search

from autotune.errors import StudyError
from autotune.measure.measurement import NO_EVALUATION, Evaluated
from autotune.plan import Peak, load_plan
from autotune.search_spaces import load_space
from autotune.searches.events import Warned
from autotune.workers import Measured, MeasureRequest, PredictRequest
from autotune.workers.table import TableExecutor

COMMAND = (sys.executable, "train.py", "--lr", "0.1", "--bs={batch.micro=64}", "--acc={batch.accumulate}")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch, in_memory):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "online")


def test_each_trial_is_the_script_with_its_plans_batch_in_its_flags():
    run = run_search(options(task="train.py", command=COMMAND, budget=400 * MIB, trials=6))
    inspect, *others = run.executor.requests
    start = (sys.executable, "-P", "-m", "autotune.script", "--add-path", "train.py", "--lr", "0.1")
    assert inspect.command == (*start, "--bs=64", "--acc=1")
    measured = [request for request in others if isinstance(request, MeasureRequest)]
    for request in measured:
        batch = request.plan.settings.batch
        assert request.command == (*start, f"--bs={batch.micro}", f"--acc={batch.accumulate}")
        assert "WANDB_MODE" not in request.environment
        assert request.environment["HF_HUB_OFFLINE"] == "1"
    assert len({request.command for request in measured}) > 1
    assert not any(isinstance(request, PredictRequest) for request in others)
    assert "start the job by `autotune run plan.yaml -- " in run.plan.notes[0]


def test_without_flags_for_it_the_batch_stays_as_it_is_and_that_is_said_once_before_the_script_runs():
    run = run_search(options(task="train.py", command=COMMAND[:4], trials=30))
    assert {settings.batch.micro for settings in run.measured} == {64}
    (said,) = (event for event in run.events if isinstance(event, Warned) and "batch" in event.message)
    assert said is run.events[0]
    assert said.message.startswith("batch stays as it is: no flag for the micro-batch or ")


class Evaluating(TableExecutor):
    """Scripts that evaluate 6,000 samples: 8 MiB for each of a batch on 150 MiB, the faster, the larger the batch."""

    fills = 10**9
    """Most samples that are evaluated at once."""

    def _answer(self, request):
        outcome = super()._answer(request)
        if not isinstance(outcome, Measured) or request.plan.evaluation is None:
            return outcome
        batch = request.plan.evaluation.batch
        peak_bytes = max(outcome.measurement.peak.process, (150 + 8 * batch) * MIB)
        made = {"batch": batch, "seconds": 10 * (1 + 64 / batch), "num_samples": 6000, "peak_bytes": peak_bytes}
        one = Evaluated(**made, largest_call=min(batch, self.fills))
        changed = outcome.measurement.model_copy(update={"peak": Peak(process=peak_bytes), "evaluations": (one,)})
        return outcome.model_copy(update={"measurement": changed})


EVALUATION = "{evaluation.batch=32}"


def evaluating(kind=Evaluating, words=(f"--eval={EVALUATION}",), **asked):
    known = facts()
    Path("space.yaml").write_text(SMALL)
    rows = [row(settings) for settings in configurations(known, load_space("space.yaml"))]
    command = (*COMMAND[:4], "--bs=64", "--acc=1", *words)
    return run_search(every(task="train.py", command=command, **asked), known=known, executor=kind(known, rows))


def told_to_evaluate(run, kind):
    measured = [one for one in run.executor.requests if isinstance(one, MeasureRequest) and one.id.startswith(kind)]
    return [one.command[-1] for one in measured if one.plan.settings != REFERENCE]


def test_the_evaluation_batch_of_a_script_is_found_by_a_run_each_and_measured_and_written():
    """2,500 MiB hold 283 samples: 256, which are 7 % faster than 128."""
    run = evaluating(budget=2500 * MIB)
    assert {*told_to_evaluate(run, "trial")} == {"--eval=32"}
    assert told_to_evaluate(run, "evaluation") == ["--eval=64", "--eval=128", "--eval=256", "--eval=512"]
    assert {*told_to_evaluate(run, "finalist")} >= {"--eval=256"}
    plan = load_plan("plan.yaml")
    assert (plan.evaluation.batch, plan.evaluation.training) == (256, None)
    assert plan.measured.peak.process == (150 + 8 * 256) * MIB


def test_a_trial_that_saw_no_evaluation_leaves_its_batch_to_a_run_of_its_own():
    class Late(Evaluating):
        def _answer(self, request):
            outcome = super()._answer(request)
            if not request.id.startswith("trial") or not isinstance(outcome, Measured):
                return outcome
            changed = outcome.measurement.model_copy(update={"evaluations": (), "warnings": (NO_EVALUATION,)})
            return outcome.model_copy(update={"measurement": changed})

    run = evaluating(Late, budget=2500 * MIB)
    assert told_to_evaluate(run, "evaluation")[:2] == ["--eval=32", "--eval=64"]
    assert run.plan.evaluation.batch == 256
    assert NO_EVALUATION not in run.plan.notes


def test_a_larger_evaluation_batch_that_brings_nothing_is_not_taken():
    class Full(Evaluating):
        fills = 64

    assert evaluating(Full, budget=2500 * MIB).plan.evaluation.batch == 64


def test_a_script_without_the_placeholder_is_not_told_what_to_evaluate():
    run = evaluating(words=())
    assert run.plan.evaluation is None
    assert told_to_evaluate(run, "evaluation") == []


def test_a_known_flag_takes_the_evaluation_batch_unless_flags_are_off():
    run = evaluating(words=("--eval-batch-size=32",), budget=1300 * MIB)
    assert run.plan.evaluation.batch == 128
    said = [event.message for event in run.events if isinstance(event, Warned)]
    assert any(one.startswith("the evaluation batch is searched through flags of the script: --eval-") for one in said)
    assert "--eval-batch-size={evaluation.batch=32}" in run.plan.notes[0]
    assert evaluating(words=("--eval-batch-size=32",), flags="off").plan.evaluation is None


def test_a_study_of_another_command_is_not_resumed():
    run_search(options(task="train.py", command=COMMAND, trials=3))
    other = tuple(word.replace("0.1", "0.2") for word in COMMAND)
    with pytest.raises(StudyError, match=r"the command was .*--lr 0\.1.*, but is .*--lr 0\.2"):
        run_search(options(task="train.py", command=other, trials=3, resume=True))


def test_what_the_facts_leave_out_is_not_tried():
    known = facts(left_out={"precision": "of its own", "pruning": "never"})
    run = run_search(options(trials=30), known=known)
    assert {settings.precision.kind for settings in run.measured} == {"default"}
    said = [event.message for event in run.events if isinstance(event, Warned)]
    assert "precision stays as it is: of its own." in said
    assert not any("pruning" in one for one in said)


def test_losses_are_compared_where_two_runs_of_the_script_are_alike():
    known = facts(first_losses=(1.0, 0.98, 0.99))  # the table's reference: 1.0 at every step
    run = run_search(options(task="train.py", command=COMMAND, trials=6), known=known)
    reference, *others = (one for one in run.executor.requests if isinstance(one, MeasureRequest) and not one.fresh)
    assert (reference.options.parity_batch, reference.options.reference_losses) == (64, None)
    assert {one.options.reference_losses for one in others if one.options.parity_batch} == {(1.0,)}
    assert not any("not compared" in event.message for event in run.events if isinstance(event, Warned))


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"first_losses": (1.03, 1.0)}, "two runs of it as it stands differ, by 3.0% at step 1"),
        ({"first_losses": (1.0,), "not_comparable": "its model draws"}, "its model draws"),
    ],
)
def test_where_they_are_not_it_is_said_once_and_their_sum_alone_is_compared(known, reason):
    run = run_search(options(task="train.py", command=COMMAND, trials=6), known=facts(**known))
    _, *others = (one for one in run.executor.requests if isinstance(one, MeasureRequest))
    assert {one.options.sums_only for one in others if one.options.parity_batch} == {True}
    said = [event.message for event in run.events if isinstance(event, Warned) and "not compared" in event.message]
    assert said == [f"the losses of trials are not compared with the reference's: {reason}."]
