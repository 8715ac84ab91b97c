"""The evaluation batch of a search: small in trials, the fastest that fits in the plan, and measured there."""

from __future__ import annotations

import pytest
from search_tables import MIB, REFERENCE, configurations, every, facts, is_again, measurement, row, run_search

from autotune.commands.verify import verify_plan
from autotune.errors import NothingFits
from autotune.measure.measurement import Evaluated
from autotune.plan import Peak, load_plan
from autotune.search_spaces import load_space
from autotune.searches.events import Warned
from autotune.workers import Measured, OutOfMemory
from autotune.workers.table import TableExecutor

EVALUATES = facts(evaluates=True, evaluation_batch=64)


class Evaluating(TableExecutor):
    """Evaluates 6,000 samples: 8 MiB for each of a batch on 150 MiB, the faster, the larger the batch."""

    most = 10**9
    """The batch from which on a process is ended."""
    later = 0
    """MiB that fresh processes take beyond the first."""

    def _answer(self, request):
        outcome = super()._answer(request)
        if not isinstance(outcome, Measured) or request.options.evaluation is None:
            return outcome
        planned = request.plan.evaluation.batch if request.plan.evaluation else 64
        asked = request.options.evaluation.batches or (planned,)
        if asked[-1] > self.most:
            return OutOfMemory(peak_bytes=2**40, message="ended by the watchdog")
        measurement, found = outcome.measurement, []
        peak_bytes = before_bytes = measurement.peak.process
        for batch in asked:
            takes = 150 + 8 * batch + (self.later if is_again(request) and request.fresh else 0)
            before, peak_bytes = peak_bytes, max(peak_bytes, takes * MIB)
            seconds = 10 * (1 + 64 / batch)
            found.append(
                Evaluated(batch=batch, seconds=seconds, num_samples=6000, before_bytes=before, peak_bytes=peak_bytes)
            )
        found[0] = found[0].model_copy(update={"before_bytes": before_bytes})
        whole = measurement.model_copy(update={"peak": Peak(process=peak_bytes), "evaluations": tuple(found)})
        return outcome.model_copy(update={"measurement": whole})


pytestmark = pytest.mark.usefixtures("in_memory", "small_space")


def search(kind=Evaluating, known=EVALUATES, **asked):
    executor = kind(known, [row(settings) for settings in configurations(known, load_space("space.yaml"))])
    return run_search(every(**asked), known=known, executor=executor)


def requests(run, kind):
    return [one for one in run.executor.requests if one.kind == "measure" and one.id.startswith(kind)]


def test_a_trial_evaluates_at_its_micro_batch_at_most_and_the_reference_as_today():
    """Today at 200 at once, 64 of which a trial has in a micro-batch."""
    run = search(known=facts(evaluates=True, evaluation_batch=200))
    first, *others = requests(run, "trial")
    assert first.plan.evaluation is None
    assert {one.plan.evaluation.batch for one in others} == {64}
    assert {4 * one.options.evaluation.most_s for one in (first, *others)} == {first.options.trial_time_s}


def test_the_fastest_evaluation_batch_within_the_budget_is_found_measured_and_written():
    """Of 2,500 MiB with a margin of 3 %, 256 take 2,198, and 512 would take 4,246."""
    run = search(budget=2500 * MIB)
    (ladder,) = requests(run, "evaluation")
    assert ladder.fresh
    assert ladder.options.evaluation.batches == tuple(64 << power for power in range(9))
    rounds = [one for one in requests(run, "finalist") if one.fresh]
    assert {one.plan.evaluation.batch for one in rounds if one.plan.settings != REFERENCE} == {256}
    assert {one.plan.evaluation for one in rounds if one.plan.settings == REFERENCE} == {None}
    plan = load_plan("plan.yaml")
    assert (plan.evaluation.batch, plan.evaluation.seconds) == (256, 12.5)
    assert plan.measured.peak.process == (150 + 8 * 256) * MIB
    assert plan.evaluation.training < plan.measured.peak.process
    assert plan.measured.fits


def test_a_larger_batch_that_is_no_faster_is_not_taken():
    """Without a limit 16,384 are tried, at 598 samples a second: 2,048 are within 5 % of that."""
    assert search().plan.evaluation.batch == 2048


def test_where_a_process_is_ended_fewer_doublings_are_tried():
    class Ended(Evaluating):
        most = 512

    run = search(Ended)
    assert [one.options.evaluation.batches[-1] for one in requests(run, "evaluation")] == [16384, 1024, 256]
    assert run.plan.evaluation.batch == 256


def test_a_batch_that_is_over_the_budget_after_all_is_halved():
    """Fresh processes of the finalists take 300 MiB more than the one in which it was found."""

    class Later(Evaluating):
        later = 300

    run = search(Later, budget=2500 * MIB)
    assert run.plan.evaluation.batch == 128
    said = [one.message for one in run.seen(Warned)]
    assert any("batches of 256 are over the budget in evaluation after all" in one for one in said)
    assert not any("is out" in one for one in said)


def test_a_budget_between_training_and_its_evaluation_is_not_met():
    """Without an evaluation in it, 496 MiB of training would be the plan, and the job over its budget."""
    known = facts(evaluates=True)
    with pytest.raises(NothingFits, match="Nearest miss: 662 MiB"):
        search(known=known, budget=640 * MIB)
    assert search(TableExecutor, known=known, budget=640 * MIB).plan.measured.fits


def test_verify_measures_the_plans_evaluation_batch():
    run = search(budget=2500 * MIB)
    executor = Evaluating(EVALUATES, [row(run.plan.settings)])
    found = verify_plan(run.plan, "model.py", executor, lambda words: None)
    asked = [one for one in executor.requests if one.kind == "measure"]
    assert {one.plan.evaluation.batch for one in asked} == {256}
    assert found.holds
    assert (found.evaluation.batch, found.measured.peak.process) == (256, (150 + 8 * 256) * MIB)
    smaller = run.plan.model_copy(update={"budget": run.plan.budget.model_copy(update={"limit": 2000 * MIB})})
    assert not verify_plan(smaller, "model.py", executor, lambda words: None).holds


def test_verify_evaluates_a_plan_without_a_batch_as_its_job_does():
    """At the task's own 200, which ``apply`` takes then, and not at a trial's micro-batch."""
    known = facts(evaluates=True, evaluation_batch=200)
    plan = search(known=known).plan.model_copy(update={"evaluation": None})
    executor = Evaluating(known, [row(plan.settings)])
    verify_plan(plan, "model.py", executor, lambda words: None)
    assert {one.plan.evaluation for one in executor.requests if one.kind == "measure"} == {None}


def test_a_task_that_lets_no_batch_be_chosen_is_not_asked_for_one():
    run = search(known=facts(evaluates=True), budget=2500 * MIB)
    assert requests(run, "evaluation") == []
    assert run.plan.evaluation.batch == 64  # as the table says of it


@pytest.mark.parametrize(("device", "before", "peak"), [("cpu", 510, 730), ("cuda", 310, 430)])
def test_ranks_evaluate_at_the_memory_of_all_and_on_cuda_of_the_largest(device, before, peak):
    reserved = 1 if device == "cuda" else None

    def of_rank(before: int, peak: int) -> Measured:
        one = Evaluated(batch=8, seconds=1.0, num_samples=64, before_bytes=before, peak_bytes=peak)
        made = {"evaluations": (one,), "peak": Peak(process=peak, reserved=reserved)}
        return Measured(measurement=measurement(1.0, process=peak).model_copy(update=made))

    every = [of_rank(200, 300), of_rank(310, 430)]
    peaks, evaluations = zip(*((one.measurement.peak, one.measurement.evaluations) for one in every), strict=True)
    found = every[0].at_peak_of(peaks, evaluations).measurement
    assert (found.training_bytes, found.evaluations[0].peak_bytes, found.peak.process) == (before, peak, peak)
