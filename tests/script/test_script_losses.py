"""The losses of a script's first steps: what they tell of a split, and whether they can be compared."""

from __future__ import annotations

import re
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch
from search_tables import facts

from autotune.measure import InspectOptions, MeasureOptions, evaluation
from autotune.measure.timing import moments
from autotune.plan import Budget, Evaluation, Plan
from autotune.script.plan.applied import InScript
from autotune.script.plan.hooks import ScriptHooks
from autotune.script.trial import timing
from autotune.script.trial.look import Look
from autotune.script.trial.timing import ScriptTiming
from autotune.searches.requests import PARITY_LIMITS, Requests
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.workers import Inspected, InspectRequest, Measured, MeasureRequest

SCRIPT = """
import sys, torch
from torch import nn
micro, accumulate, divisor, dropout = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
torch.manual_seed(0)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
place = 0
for step in range(10**9):
    for _ in range(accumulate):
        mine = slice(place % 64, place % 64 + micro)
        (nn.functional.mse_loss(model(x[mine]), y[mine]) / divisor).backward()
        place += micro
    optimizer.step()
    optimizer.zero_grad()
"""
"""Trains until it is ended: ``micro``, ``accumulate``, what each loss is divided by, and dropout."""


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Run the script here, watched, until there is an outcome."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)

    def watch(observe, *arguments):
        found = []

        def answer(outcome):
            found.append(outcome)
            raise SystemExit(0)

        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        in_script = InScript(Plan(settings=Settings()), Path("plan.yaml"))
        hooks = ScriptHooks(in_script)
        hooks.observer = observe(in_script, answer)
        hooks.install()
        try:
            with pytest.raises(SystemExit):
                runpy.run_path(str(path), run_name="__main__")
        finally:
            hooks.remove()
        return found[0]

    return watch


@pytest.fixture
def losses(watch):
    """Parity of a trial of the script."""

    def losses(*arguments, **options):
        measure = MeasureOptions(trial_time_s=0.2, parity_batch=16, **options)
        request = MeasureRequest(id="x", task="train.py", device="cpu", plan=Plan(settings=Settings()), options=measure)
        outcome = watch(lambda _, answer: ScriptTiming(request, time.monotonic(), answer, lambda _: None), *arguments)
        assert isinstance(outcome, Measured), outcome
        return outcome.measurement.parity

    return losses


@pytest.mark.slow
def test_a_split_that_the_script_weighs_keeps_the_losses_and_one_that_it_does_not_is_told(losses):
    whole = losses(16, 1, 1, 0)
    assert 3 <= len(whole.losses) <= 10  # as many as were made in the time
    assert whole.strayed_at is None
    split = losses(4, 4, 4, 0, reference_losses=whole.losses)
    assert split.losses[:3] == pytest.approx(whole.losses[:3], rel=1e-4)
    assert split.strayed_at is None
    unweighed = losses(4, 4, 1, 0, reference_losses=whole.losses)
    assert unweighed.strayed_at == 1
    assert unweighed.losses[0] == pytest.approx(4 * whole.losses[0], rel=1e-4)


@pytest.fixture
def course(losses, tmp_path):
    """Parity of a trial of the script with one of its lines changed, of four passes a step, held against one pass."""

    def course(old, new, divisor=4, dropout=0.5):
        (tmp_path / "train.py").write_text(SCRIPT.replace(old, new))
        whole = losses(16, 1, 1, dropout, sums_only=True)
        assert (whole.unlike, whole.compared) == (None, None)
        known = {"reference_losses": whole.losses, "reference_course": whole.course}
        return losses(4, 4, divisor, dropout, sums_only=True, **known)

    return course


@pytest.mark.slow
def test_with_dropout_a_loss_that_is_not_divided_is_seen_in_the_sum(course):
    found = course("", "")
    assert (found.unlike, found.compared) == (None, "sums")
    undivided = course("", "", divisor=1).unlike
    assert re.search(r"the losses of \d+ steps add up to [345]", undivided)
    assert "Divide each loss by the backward passes to a step" in undivided


OTHER_RATES = {
    "of the batch's flag": ("lr=0.01", "lr=0.01 * micro / 16", "at step 1 its learning rate is 0.0025, and the job's"),
    "of a schedule that counts micro-batches": (
        "        place += micro",
        "        place += micro\n        optimizer.param_groups[0]['lr'] *= 0.9",
        "at step 1 its learning rate is 0.006561, and the job's is 0.009",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHER_RATES)
def test_a_learning_rate_that_hangs_on_the_batch_is_seen(what, course):
    old, new, said = OTHER_RATES[what]
    assert said in course(old, new).unlike


@pytest.mark.slow
def test_steps_of_another_number_of_samples_are_seen(course):
    """The script makes one pass more than it was told to."""
    found = course("range(accumulate)", "range(accumulate + (accumulate > 1))", divisor=5)
    assert "an optimizer step is of 20 samples, and the job's of 16" in found.unlike


@pytest.mark.parametrize("dropout", [0, 0.5])
def test_the_first_steps_tell_whether_losses_can_be_compared(dropout, watch):
    request = InspectRequest(id="x", task="train.py", device="cpu", options=InspectOptions())
    outcome = watch(lambda found, answer: Look(request, found, 1, answer), 4, 4, 4, dropout)
    assert isinstance(outcome, Inspected), outcome
    assert len(outcome.facts.first_losses) == 3
    reason = outcome.facts.not_comparable
    assert reason is None if not dropout else "draws random numbers" in reason


@pytest.mark.parametrize(
    ("line", "draws"), [("", False), ("x = x + 0 * torch.rand(1)", True), ("random.random()", True)]
)
def test_random_numbers_between_passes_are_seen(line, draws, watch, tmp_path):
    """Noise that the script adds, and what it draws by Python's own generator."""
    loop = f"        {line}\n        mine = slice("
    (tmp_path / "train.py").write_text("import random" + SCRIPT.replace("        mine = slice(", loop))
    request = InspectRequest(id="x", task="train.py", device="cpu", options=InspectOptions())
    facts = watch(lambda found, answer: Look(request, found, 1, answer), 4, 4, 4, 0).facts
    assert facts.draws_between_passes == draws
    assert facts.not_comparable is None


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_trial_without_an_evaluation_says_that_its_peak_is_of_training_alone(evaluates, watch, tmp_path):
    if evaluates:
        path = tmp_path / "train.py"
        line = "    model.eval()\n    with torch.no_grad(): model(x)\n    model.train()\n"
        path.write_text(SCRIPT + line)
    options = MeasureOptions(trial_time_s=0.2, parity_batch=None)
    request = MeasureRequest(id="x", task="train.py", device="cpu", plan=Plan(settings=Settings()), options=options)
    outcome = watch(lambda _, answer: ScriptTiming(request, time.monotonic(), answer, lambda _: None), 16, 1, 1, 0)
    assert isinstance(outcome, Measured), outcome
    assert outcome.measurement.parity.losses == ()
    assert any("did not evaluate" in one for one in outcome.measurement.warnings) == (not evaluates)


EVALUATES = """
    if step % {every} == {every} - 1:
        model.eval()
        with torch.no_grad():
            for rows in x.split(32):
                model(rows)
                torch.time_passes()
        model.train()
"""


@pytest.fixture
def timed(watch, tmp_path, monkeypatch):
    """The measurement and the observer of a script, of whose evaluation each batch takes a thousand seconds."""
    passed = [0.0]
    for module in (timing, evaluation, moments):
        monkeypatch.setattr(module, "perf_counter", lambda: time.perf_counter() + passed[0])
    monkeypatch.setattr(torch, "time_passes", lambda: passed.append(passed.pop() + 1000), raising=False)

    def timed(script, evaluation=None):
        (tmp_path / "train.py").write_text(script)
        options = MeasureOptions(trial_time_s=0.3, parity_batch=None)
        plan = Plan(settings=Settings(), evaluation=evaluation)
        request = MeasureRequest(id="x", task="train.py", device="cpu", plan=plan, options=options)
        seen = []

        def observe(_, answer):
            seen.append(ScriptTiming(request, time.monotonic(), answer, lambda _: None))
            return seen[0]

        outcome = watch(observe, 16, 1, 1, 0)
        assert isinstance(outcome, Measured), outcome
        return outcome.measurement, seen[0]

    return timed


@pytest.mark.slow
@pytest.mark.parametrize(("every", "counts"), [(5, False), (1, True)])
def test_an_evaluation_is_left_out_of_the_speed_unless_each_step_makes_one(every, counts, timed):
    """With it, a step takes at least 400 seconds."""
    measurement, _ = timed(SCRIPT + EVALUATES.format(every=every))
    assert (measurement.samples_per_s.value < 1) == counts
    assert measurement.warnings == ()


@pytest.mark.slow
def test_an_evaluation_is_measured_where_the_script_was_told_its_batch(timed):
    """Two calls of 32 samples, a thousand seconds each."""
    script = SCRIPT + EVALUATES.format(every=5)
    (found,) = timed(script, Evaluation(batch=32))[0].evaluations
    assert (found.batch, found.num_samples, found.largest_call, found.is_whole) == (32, 64, 32, True)
    assert 2000 <= found.seconds < 2100
    assert found.before_bytes is None
    assert timed(script)[0].evaluations == ()
    (unseen,) = timed(SCRIPT, Evaluation(batch=32))[0].evaluations
    assert (unseen.batch, unseen.num_samples, unseen.is_whole) == (32, 0, False)


@pytest.mark.slow
def test_samples_are_what_a_loader_put_together(timed):
    """In the last batch too; not the channels of the first of its images, which a list of them is taken for."""
    script = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for images in DataLoader(torch.randn(40, 3, 4), batch_size=16, collate_fn=list):
        model(torch.stack(images)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    _, seen = timed(script)
    epochs, steps = divmod(seen.num_steps, 3)
    assert seen.num_samples == 40 * epochs + 16 * steps


def test_a_split_that_sees_other_random_numbers_is_compared_less_closely():
    known = Requests("train.py", 0, Budget(limit=None, device="cpu"), facts(draws_between_passes=True))
    batches = (Batch(micro=64), Batch(micro=32, accumulate=2))
    limits = [known.measure_options(Settings(batch=batch), 1.0, None).parity_limit for batch in batches]
    assert limits == [PARITY_LIMITS["exact"], 0.5]


@pytest.mark.medium
def test_batches_that_are_drawn_to_evaluate_are_no_samples_of_training(timed):
    """Although gradients are on while they are drawn."""
    script = """
import torch
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(64, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train, held_out = (DataLoader(TensorDataset(x), batch_size=size) for size in (16, 64))
while True:
    for (rows,) in train:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for (rows,) in held_out:
        with torch.no_grad():
            model(rows)
    model.train()
"""
    _, seen = timed(script)
    assert seen.num_samples == 16 * seen.num_steps
    assert seen.num_batches == seen.num_steps
