"""The job's own evaluation: in a trial's peak, stopped where it takes too long, its batch found and applied."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

import pytest
import torch
from line_task import floats, line, training_of
from torch import nn
from torch._dynamo.callback import CallbackTrigger, callback_handler

import autotune
from autotune.errors import TaskError
from autotune.measure import evaluation
from autotune.measure.evaluation import measure_evaluations
from autotune.measure.life.growth import Witness
from autotune.measure.measurement import EvaluationOptions, MeasureOptions
from autotune.measure.timing import compile_time
from autotune.plan import Budget, Evaluation, Peak, Plan
from autotune.searches.verdict import judge
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.precision import Precision
from autotune.workers import Measured, MeasureRequest

MIB = 2**20


class ByTable:
    """A charge whose peak is what was called last, in MiB a sample, on 100 MiB."""

    def __init__(self) -> None:
        self.bytes, self.watched = 100 * MIB, 0

    def take(self, batch: int) -> None:
        self.bytes = max(self.bytes, (100 + batch) * MIB)

    def peak(self) -> Peak:
        return Peak(process=self.bytes)

    def high_water_bytes(self) -> int:
        return self.bytes

    phase_bytes = high_water_bytes

    def enter(self, phase: str) -> None:
        """There is one phase."""

    def taken(self) -> Callable[[], int]:
        return lambda: 0

    def witness(self) -> Witness:
        return Witness(lambda: None, 1, 4)

    def sample_descendants(self, every_s: float = 0.0) -> None:
        self.watched += 1

    def exceeds(self, budget: Budget | None) -> bool:
        return budget is not None and not budget.holds(self.bytes)


def options(limit: int | None = None, most_s: float = 60.0, batches: tuple[int, ...] = ()) -> MeasureOptions:
    budget = Budget(limit=limit * MIB, margin=0) if limit else None
    asked = EvaluationOptions(most_s=most_s, batches=batches)
    return MeasureOptions(parity_batch=None, budget=budget, evaluation=asked)


def judged(charge: ByTable, num_samples: int = 64):
    """Evaluates so many samples in batches, each of which the charge is told of."""

    def evaluate(model: nn.Module, batch_size: int) -> float:
        for _ in range(0, num_samples, batch_size):
            size = min(batch_size, num_samples)
            charge.take(size)
            model(torch.ones(size))
        return 0.0

    return line(floats(4), batch_size=2, evaluate=evaluate)


def test_what_is_evaluated_is_counted_and_its_peak_told_apart_from_trainings():
    """Two calls of 32 samples: 132 MiB, and 100 before."""
    charge = ByTable()
    task = judged(charge)
    training = training_of(task)
    training.evaluation_batch = 32
    (found,) = measure_evaluations(training, task, options(), charge)
    assert (found.batch, found.num_samples, found.largest_call, found.is_whole) == (32, 64, 32, True)
    assert (found.before_bytes, found.peak_bytes) == (100 * MIB, 132 * MIB)
    assert charge.watched


def test_one_that_takes_too_long_is_stopped_at_the_models_next_call():
    """After its first, whatever is caught in it; modes and the model's own call are put back."""
    calls = []

    def evaluate(model: nn.Module) -> float:
        model.eval()
        while True:
            with contextlib.suppress(Exception):  # as a careless one does
                calls.append(model(torch.ones(2)))

    task = line(floats(4), batch_size=2, evaluate=evaluate)
    training = training_of(task)
    (found,) = measure_evaluations(training, task, options(most_s=1e-9), ByTable())
    assert (len(calls), found.is_whole, found.batch, found.num_samples) == (1, False, None, 2)
    assert training.model.training
    assert "_compiled_call_impl" not in vars(training.model)


@pytest.mark.parametrize("calls", [0, 1])
def test_one_without_an_end_is_stopped_where_it_calls_no_model(calls):
    def evaluate(model: nn.Module) -> float:
        for _ in range(calls):
            model(torch.ones(2))
        while True:
            pass

    task = line(floats(4), batch_size=2, evaluate=evaluate)
    (found,) = measure_evaluations(training_of(task), task, options(most_s=1e-3), ByTable())
    assert (found.is_whole, found.num_samples) == (False, 2 * calls)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_call_of_the_model_is_not_cut():
    def evaluate(model: nn.Module) -> None:
        slow = model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
        model(torch.ones(2))
        slow.remove()

    task = line(floats(4), batch_size=2, evaluate=evaluate)
    (found,) = measure_evaluations(training_of(task), task, options(most_s=1e-3), ByTable())
    assert (found.is_whole, found.num_samples) == (True, 2)


def test_batches_are_tried_upward_until_twice_the_last_would_not_fit():
    """Of 260 MiB: 64 takes 164, 128 takes 228, 64 more, and 256 may take 128 more than that."""
    charge = ByTable()
    task = judged(charge, num_samples=1024)
    found = measure_evaluations(training_of(task), task, options(260, batches=(8, 16, 32, 64, 128, 256)), charge)
    assert [one.batch for one in found] == [8, 16, 32, 64, 128]
    assert found[-1].is_whole


def test_a_batch_that_the_data_does_not_fill_is_the_last():
    charge = ByTable()
    task = judged(charge, num_samples=20)
    found = measure_evaluations(training_of(task), task, options(batches=(8, 16, 32, 64)), charge)
    assert [(one.batch, one.largest_call) for one in found] == [(8, 8), (16, 16), (32, 20)]


def test_memory_that_runs_out_ends_the_larger_batches_and_not_the_first():
    def evaluate(model: nn.Module, batch_size: int) -> float:
        if batch_size > 8:
            raise torch.OutOfMemoryError
        return 0.0

    task = line(floats(4), batch_size=2, evaluate=evaluate)
    found = measure_evaluations(training_of(task), task, options(batches=(4, 8, 16, 32)), ByTable())
    assert [one.batch for one in found] == [4, 8]
    with pytest.raises(torch.OutOfMemoryError):
        measure_evaluations(training_of(task), task, options(batches=(16,)), ByTable())


def test_a_library_that_has_no_memory_on_a_full_card_ends_the_larger_batches_too(monkeypatch):
    monkeypatch.setattr("autotune.training.out_of_memory._is_full", lambda: True)

    def evaluate(model: nn.Module, batch_size: int) -> float:
        if batch_size > 8:
            raise RuntimeError("FIND was unable to find an engine to execute this computation")
        return 0.0

    task = line(floats(4), batch_size=2, evaluate=evaluate)
    found = measure_evaluations(training_of(task), task, options(batches=(4, 8, 16, 32)), ByTable())
    assert [one.batch for one in found] == [4, 8]


def test_one_that_raises_is_the_users_error():
    def evaluate(model: nn.Module) -> float:
        raise KeyError("label")

    task = line(floats(4), batch_size=2, evaluate=evaluate)
    with pytest.raises(TaskError, match=r"evaluate\(model\) raised KeyError"):
        measure_evaluations(training_of(task), task, options(), ByTable())


def test_what_it_returns_is_not_judged():
    """A perplexity that overflows after a handful of steps says nothing of the memory."""
    for said in (float("nan"), float("inf"), torch.tensor(1.0)):
        task = line(floats(4), batch_size=2, evaluate=lambda model, said=said: said)
        assert measure_evaluations(training_of(task), task, options(), ByTable())


def test_a_model_that_is_changed_and_put_back_was_not_changed():
    """As a weight average is put in, and taken out again."""

    def evaluate(model: nn.Module) -> float:
        kept = model.weight.detach().clone()
        model.weight.copy_(torch.zeros(()))
        model.weight.copy_(kept)
        return 0.0

    task = line(floats(4), batch_size=2, evaluate=evaluate)
    assert measure_evaluations(training_of(task), task, options(), ByTable())


def test_compiling_takes_none_of_an_evaluations_time(monkeypatch):
    """Nor is it stopped for that: torch says when it compiles, here for a thousand seconds."""
    now = [0.0]
    for module in (evaluation, compile_time):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def evaluate(model: nn.Module) -> float:
        for _ in range(2):
            with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
                now[0] += 1000
            now[0] += 1
            model(torch.ones(2))
        return 0.0

    task = line(floats(4), batch_size=2, evaluate=evaluate)
    (found,) = measure_evaluations(training_of(task), task, options(), ByTable())
    assert (found.seconds, found.is_whole) == (2.0, True)


def test_a_task_that_evaluates_in_its_precision_is_evaluated_in_the_plans():
    seen = []

    def evaluate(model: nn.Module) -> float:
        seen.append(torch.is_autocast_enabled("cpu"))
        return 0.0

    settings = Settings(batch=Batch(micro=2), precision=Precision(kind="bf16"))
    for evaluates_in_context in (True, False):
        task = line(floats(4), batch_size=2, evaluate=evaluate, evaluates_in_context=evaluates_in_context)
        measure_evaluations(autotune.apply(Plan(settings=settings), task), task, options(), ByTable())
    assert seen == [True, False]


def test_the_batch_of_an_evaluation_is_the_plans_or_the_tasks_own_or_the_micro_batch():
    def today(model: nn.Module, batch_size: int = 256) -> float:
        return 0.0

    def free(model: nn.Module, batch_size: int) -> float:
        return 0.0

    settings = Settings(batch=Batch(micro=2, accumulate=2))
    for evaluate, own in ((today, 256), (free, 2), (lambda model: 0.0, None), (None, None)):
        task = line(floats(4), batch_size=4, evaluate=evaluate)
        assert autotune.apply(Plan(settings=settings), task).evaluation_batch == own
        planned = Plan(settings=settings, evaluation=Evaluation(batch=64))
        assert autotune.apply(planned, task).evaluation_batch == 64


@pytest.mark.parametrize(
    ("evaluate", "said"),
    [
        (lambda model, batch_size=0: 0.0, "evaluate's batch_size must be a whole number of samples, .* but is 0"),
        (lambda model, size: 0.0, r"evaluate takes \(model, size\), but is called with \(model\)"),
    ],
)
def test_an_evaluate_that_cannot_be_called_is_refused(evaluate, said):
    with pytest.raises(TaskError, match=said):
        line(floats(2), evaluate=evaluate)


def test_a_plans_evaluation_is_read_back_as_it_was_written():
    plan = Plan(settings=Settings(), evaluation=Evaluation(batch=64, seconds=1.5, training=100 * MIB))
    assert "evaluation: {batch: 64, seconds: 1.5, training: 100 MiB}\n" in plan.to_yaml()
    assert Plan.from_yaml(plan.to_yaml()) == plan


TASK = """
import torch
from torch import nn

def build_model(): return nn.Linear(8, 1)
def build_dataset(): return list(torch.randn(64, 8))
def compute_loss(model, batch): return model(batch).square().mean()

def evaluate(model, batch_size=2):
    held = torch.ones(batch_size, 32 * 2**18)  # 32 MiB a sample
    return model(held[:, :8]).mean().item()
"""


@pytest.fixture
def measured(tmp_path, local_executor):
    """A trial of the task above, in a process of its own."""
    path = tmp_path / "model.py"
    path.write_text(TASK)

    def measured(limit_bytes: int | None, batches: tuple[int, ...] = (), evaluates: bool = True) -> Measured:
        budget = Budget(limit=limit_bytes, margin=0)
        asked = EvaluationOptions(most_s=60, batches=batches) if evaluates else None
        measure = MeasureOptions(trial_time_s=0.2, parity_batch=None, budget=budget, evaluation=asked)
        plan = Plan(settings=Settings(batch=Batch(micro=4)), budget=budget)
        request = MeasureRequest(id="x", task=str(path), device="cpu", plan=plan, options=measure)
        outcome = local_executor.ask(request)
        assert isinstance(outcome, Measured), outcome
        return outcome

    return measured


@pytest.mark.medium
def test_a_budget_between_training_and_its_evaluation_is_not_held(measured):
    """Two samples of 32 MiB: the same trial without its evaluation would be within the budget."""
    training = measured(None, evaluates=False).measurement.peak.process
    between = Budget(limit=training + 32 * MIB, margin=0)
    outcome = measured(between.limit)
    found = outcome.measurement
    assert found.training_bytes == pytest.approx(training, abs=16 * MIB)
    assert found.peak.process - found.training_bytes == pytest.approx(64 * MIB, abs=16 * MIB)
    verdict = judge(outcome, between, 2**40)
    assert not verdict.feasible
    assert verdict.reason.endswith(", margin included, in its evaluation")
    alone = outcome.model_copy(update={"measurement": measured(between.limit, evaluates=False).measurement})
    assert judge(alone, between, 2**40).feasible


@pytest.mark.medium
def test_one_process_tries_batches_upward_while_the_budget_holds(measured):
    """Of 230 MiB beyond training, 2 take 64, 4 take 128, and 8 may take 256."""
    training = measured(None, evaluates=False).measurement.peak.process
    found = measured(training + 230 * MIB, batches=(2, 4, 8, 16)).measurement.evaluations
    assert [(one.batch, one.largest_call, one.is_whole) for one in found] == [(2, 2, True), (4, 4, True)]
    assert found[1].peak_bytes - found[0].peak_bytes == pytest.approx(64 * MIB, abs=16 * MIB)
