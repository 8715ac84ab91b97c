"""What each choice of the winner bought: measured in turn with it, in fresh interpreters, once the plan is written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from search_tables import BF16, BOTH, MIB, REFERENCE, TCMALLOC, every, facts, row, run_search

from autotune.plan import load_plan
from autotune.searches.events import AblationEnded, Warned
from autotune.searches.winner.ablation import counterparts
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.workers import Failed, OutOfMemory
from autotune.workers.table import TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory", "small_space")

TABLE = [row(settings) for settings in (REFERENCE, BF16, TCMALLOC, BOTH)]


def test_each_choice_alone_is_reset_to_the_references():
    winner = BOTH.model_copy(update={"batch": Batch(micro=16, accumulate=4)})
    parts = {part.choice.name: part.settings for part in counterparts(winner, REFERENCE, facts())}
    assert parts == {
        "batch": BOTH,
        "precision": TCMALLOC.model_copy(update={"batch": winner.batch}),
        "allocator": BF16.model_copy(update={"batch": winner.batch}),
    }


def test_the_winner_and_its_counterparts_take_turns_in_fresh_interpreters_after_the_plan_is_written():
    """Both figures of each are the same in every round, so that two rounds say all."""
    is_written: list[bool] = []

    class Looks(TableExecutor):
        def _answer(self, request):
            if request.id.startswith("without-"):
                is_written.append(Path("plan.yaml").exists())
            return super()._answer(request)

    run = run_search(every(ablate=True), executor=Looks(facts(), TABLE))
    requests = run.executor.requests[-6:]
    assert [request.plan.settings for request in requests] == [*(BOTH, TCMALLOC, BF16), *(BOTH, BF16, TCMALLOC)]
    assert all(request.fresh for request in requests)
    assert is_written == [True] * 6
    assert [event.without for event in run.seen(AblationEnded)] == [
        *(None, "precision", "allocator"),
        *(None, "allocator", "precision"),
    ]


def test_what_cannot_be_run_without_a_choice_is_not_asked_again():
    rows = [row(TCMALLOC, outcome=OutOfMemory(peak_bytes=10**12, message=""))]
    run = run_search(every(ablate=True), rows=rows)
    assert [event.without for event in run.seen(AblationEnded)] == [
        *(None, "precision", "allocator"),
        *(None, "allocator"),
    ]


def test_rounds_go_on_to_six_where_nothing_is_proven():
    """Without tcmalloc the speed goes up and down by a tenth about the winner's."""
    speeds = (150.0, 182.0) * 5
    run = run_search(every(ablate=True), rows=[row(BF16, samples_per_s=speeds, peak_bytes=(MIB,) * 10)])
    assert [event.round for event in run.seen(AblationEnded) if event.without == "allocator"] == [1, 2, 3, 4, 5, 6]
    assert [event.round for event in run.seen(AblationEnded) if event.without == "precision"] == [1, 2]


def test_without_the_plan_to_compare_with_nothing_is_compared():
    class Breaks(TableExecutor):
        def _answer(self, request):
            found = super()._answer(request)
            return Failed(message="gone") if request.id == "without-none-round-1" else found

    run = run_search(every(ablate=True), executor=Breaks(facts(), TABLE))
    assert [event.without for event in run.seen(AblationEnded)] == [None]
    assert any("the plan itself did not run again" in event.message for event in run.seen(Warned))


def test_an_interruption_leaves_the_plan_and_what_was_measured():
    stop = threading.Event()

    class Interrupts(TableExecutor):
        def _answer(self, request):
            if request.id == "without-precision-round-1":
                stop.set()
            return super()._answer(request)

    run = run_search(every(ablate=True), executor=Interrupts(facts(), TABLE), stop=stop)
    assert [event.without for event in run.seen(AblationEnded)] == [None, "precision"]
    assert run.plan == load_plan("plan.yaml")


def test_a_finished_search_is_ablated_on_resume_and_nothing_is_measured_again():
    first = run_search(every())
    again = run_search(every(ablate=True, resume=True))
    assert {request.id.split("-")[0] for request in again.executor.requests} == {"inspect", "without"}
    assert again.plan.settings == first.plan.settings
    third = run_search(every(ablate=True, resume=True))
    assert [request.id for request in third.executor.requests] == ["inspect"]


def test_a_plan_that_is_the_job_as_it_stands_has_nothing_to_reset():
    rows = [row(settings, samples_per_s=(1.0,)) for settings in (BOTH, BF16, TCMALLOC)]
    run = run_search(every(ablate=True), rows=rows)
    assert run.seen(AblationEnded) == []
    assert any("there is no choice to reset" in event.message for event in run.seen(Warned))


def test_what_does_not_go_together_without_a_choice_is_said():
    """Updates within backward need whole batches, and the job accumulates over two."""
    winner = Settings(batch=Batch(micro=64), optimizer_step=OptimizerStep(kind="in_backward"))
    batch, _ = counterparts(winner, Settings(batch=Batch(micro=32, accumulate=2)), facts())
    assert batch.choice.name == "batch"
    assert "use accumulate 1" in (batch.conflict or "")
