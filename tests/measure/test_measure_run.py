"""A whole measurement, on every kind of task."""

import dataclasses
import re
import time

import pytest
import torch

from autotune.measure import MeasureOptions
from autotune.measure.checks.leak import LeakWatch
from autotune.measure.checks.parity import run_parity
from autotune.measure.errors import NonFiniteLoss
from autotune.measure.processes import beside_bytes, own_peak_bytes
from autotune.measure.run import measure
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.precision import Precision
from autotune.testing.zoo import BATCH_SIZE, ZOO
from autotune.training.apply_plan import apply

pytestmark = pytest.mark.alone


def _measure(task, settings=None, **options):
    training = apply(Plan(settings=settings or Settings()), task)
    return measure(training, task, MeasureOptions(**{"trial_time_s": 0.3, "parity_batch": BATCH_SIZE, **options}))


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_task_of_the_zoo_is_measured(name):
    found = _measure(ZOO[name])
    others = beside_bytes()  # as multiprocessing's resource tracker, of earlier tests
    assert 0 <= found.samples_per_s.low <= found.samples_per_s.value <= found.samples_per_s.high
    assert found.num_windows >= 3
    assert found.num_steps >= found.num_windows
    assert 0 < found.peak.process <= own_peak_bytes() + others
    assert found.leak_bytes_per_step is None
    assert list(found.phases_s) == ["parity", "warmup", "timed", "evaluation", "leak"]


@pytest.mark.parametrize("batch", [None, BATCH_SIZE])
def test_without_a_parity_batch_no_losses_are_compared(batch, monkeypatch):
    ran = []

    def run(*arguments):
        ran.append(run_parity(*arguments))
        return ran[-1]

    monkeypatch.setattr("autotune.measure.run.run_parity", run)
    found = _measure(ZOO["mlp"], parity_batch=batch)
    assert len(ran) == (batch is not None)
    assert len(found.parity.losses) == 10 * len(ran)
    assert found.num_windows >= 3


@pytest.mark.parametrize("to_beat", [1e12, 1e-6])
def test_with_a_speed_to_beat_losses_wait_and_what_is_slower_is_timed_briefly(to_beat, monkeypatch):
    """No leak is looked for in what cannot win either."""
    looked = []
    monkeypatch.setattr(LeakWatch, "suspected", lambda self, after=0: looked.append(after))
    found = _measure(ZOO["mlp"], to_beat=to_beat)
    assert found.parity.losses == ()
    assert (found.stopped == "slower") == (to_beat == 1e12) == (looked == [])


@pytest.mark.parametrize("to_beat", [None, 1e-6])
def test_once_something_fits_what_does_not_is_looked_at_no_further(to_beat, monkeypatch):
    """Neither for a leak, nor by its losses; before that it may be the nearest miss, also once the reference's losses
    are known."""
    looked = []
    monkeypatch.setattr(LeakWatch, "suspected", lambda self, after=0: looked.append(after))
    found = _measure(ZOO["mlp"], to_beat=to_beat, budget=Budget(limit=1), reference_losses=(1.0,) * 10)
    assert found.stopped == "over"
    assert (to_beat is None) == bool(looked) == bool(found.parity.losses)


@pytest.mark.parametrize("name", ["mlp", "stream"])
@pytest.mark.parametrize("persistent", [True, False])
def test_loader_workers_are_measured(name, persistent):
    options = {"num_workers": 1, "persistent_workers": persistent or None}
    found = _measure(ZOO[name], Settings(data_loading=options))
    assert found.epoch_start_s > 0
    assert found.num_windows >= 3


def test_the_optimizers_share_is_that_of_its_own_steps():
    """50 ms before each update, and 50 ms in it."""

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(0.05)
            return super().step(lambda: time.sleep(0.05))

    task = dataclasses.replace(ZOO["mlp"], build_optimizer=lambda parameters: Slow(parameters, lr=0.1))
    found = _measure(task)
    assert 0.1 * found.num_steps <= found.optimizer_share * found.phases_s["timed"]


def test_an_accumulated_step_counts_all_its_samples():
    """22 samples an epoch, in steps of 8, 8 and 6, whatever the micro-batch."""
    consumed = []
    task = ZOO["mlp"]

    def compute_loss(model, batch):
        consumed.append(len(batch[0]))
        return task.compute_loss(model, batch)

    found = _measure(dataclasses.replace(task, compute_loss=compute_loss), Settings(batch=Batch.of(8, 3)))
    assert sum(consumed[:3]) == 8
    samples_per_step = found.samples_per_s.value * found.phases_s["timed"] / found.num_steps
    assert samples_per_step > 22 / 3 * 0.95  # the phase is a little longer than its windows; a last piece alone has 2


def test_over_the_budget_a_few_windows_are_enough():
    budget = Budget(limit=2**20)
    assert _measure(ZOO["mlp"], budget=budget, trial_time_s=30, precision=1e-6).num_windows == 3


def test_without_enforcement_the_budget_ends_nothing():
    budget = Budget(limit=2**20)
    assert _measure(ZOO["mlp"], budget=budget, enforce=False, trial_time_s=30, precision=10.0).num_windows > 3


def test_within_the_budget_nothing_ends_early():
    budget = Budget(limit=2**50)
    assert _measure(ZOO["mlp"], budget=budget, trial_time_s=30, precision=10.0).num_windows > 3


def test_where_shapes_vary_the_largest_of_the_first_batches_is_run():
    """Sentences are 2 to 8 tokens long: no batch is larger than 8 by 8 tokens, and that one is seen in warm-up."""
    seen = []
    task = ZOO["token_loss"]

    def compute_loss(model, batch):
        seen.append(batch.numel())
        return task.compute_loss(model, batch)

    found = _measure(dataclasses.replace(task, compute_loss=compute_loss), largest_of=64)
    first_after_parity = seen[10]
    assert found.peak.largest_of == 64
    assert first_after_parity == max(seen)


def test_a_loss_that_ends_as_not_a_number_is_named_with_its_step():
    """The 15th optimizer step: ten of parity, then warm-up and windows."""
    task, calls = ZOO["mlp"], iter(range(10**6))

    def compute_loss(model, batch):
        loss = task.compute_loss(model, batch)
        return loss * float("nan") if next(calls) == 14 else loss

    with pytest.raises(NonFiniteLoss) as caught:
        _measure(dataclasses.replace(task, compute_loss=compute_loss))
    assert caught.value.step == 15


def test_micro_batches_that_count_for_nothing_are_not_called_infinite():
    """(loss_sum, 0) has no mean: a micro-batch without a single token is no failure."""
    task, calls = ZOO["token_loss"], iter(range(10**6))

    def compute_loss(model, batch):
        loss, count = task.compute_loss(model, batch)
        return (loss * 0, 0 * count) if next(calls) % 2 else (loss, count)

    found = _measure(dataclasses.replace(task, compute_loss=compute_loss), Settings(batch=Batch.of(8, 4)))
    assert found.num_windows >= 3


def test_the_users_error_is_the_users():
    def compute_loss(model, batch):
        raise ZeroDivisionError("in the user's loss")

    with pytest.raises(ZeroDivisionError, match="in the user's loss"):
        _measure(dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss))


def test_a_warm_up_that_ends_early_is_not_worth_a_word():
    """No time for it at all: no worker had batches ready, no scaler skipped, and the peak is read at the end."""
    assert [said for said in _measure(ZOO["gpt"], trial_time_s=1e-3).warnings if "settle" in said] == []


def test_a_head_start_that_was_timed_is_said_with_the_time_that_would_do():
    """8 batches lie ready with two workers, and the warm-up had one or two."""
    settings = Settings(data_loading={"num_workers": 2, "prefetch_factor": 2})
    found = _measure(ZOO["gpt"], settings, trial_time_s=1e-3)
    (said,) = [said for said in found.warnings if "settle" in said]
    assert re.fullmatch(
        r"batches were timed that loader workers had ready: speeds may be too high; "
        r"--trial-time \d+s would let the training settle first",
        said,
    )


def test_a_loss_scaler_that_still_skips_is_said_with_the_time_that_would_do():
    """The loss is so large that its gradients overflow at every scale down to one."""

    def compute_loss(model, batch):
        loss, count = ZOO["token_loss"].compute_loss(model, batch)
        return loss * 1e35, count

    task = dataclasses.replace(ZOO["token_loss"], compute_loss=compute_loss)
    found = _measure(task, Settings(precision={"kind": "fp16"}), trial_time_s=1e-3, parity_batch=None)
    assert [said.partition(";")[0] for said in found.warnings] == [
        "the loss scaler still skipped steps while it was timed"
    ]


def test_a_technique_has_the_steps_that_it_asks_for_before_anything_is_timed(monkeypatch):
    """However little time there is for warming up; the loss is computed once a step, and each timed one is counted."""
    counts = {}
    for asked in (0, 40):
        monkeypatch.setattr(Precision, "warm_up_steps", lambda self, asked=asked: asked)
        calls = []

        def compute_loss(model, batch, calls=calls):
            calls.append(0)
            return ZOO["mlp"].compute_loss(model, batch)

        task = dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss)
        found = _measure(task, trial_time_s=1e-3, parity_batch=None)
        counts[asked] = len(calls) - found.num_steps
    assert counts[40] >= 40 > counts[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_cuda_the_process_is_charged_more_than_the_allocator_reserved(precision):
    task = ZOO["gpt"]
    plan = Plan(settings=Settings(precision={"kind": precision}), budget=Budget(device="cuda"))
    found = measure(apply(plan, task), task, MeasureOptions(trial_time_s=1.0, parity_batch=BATCH_SIZE))
    assert found.peak.allocated <= found.peak.reserved < found.peak.process
    assert found.parity.losses[-1] < found.parity.losses[0]
    assert found.leak_bytes_per_step is None
