"""``after_backward`` and ``after_step``: when they are called, what they see, and that trials call them too."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from line_task import floats, line, training_of
from torch import nn
from torch.optim.swa_utils import AveragedModel

import autotune
from autotune.errors import TaskError
from autotune.estimates.tracing.fake_step import FakeTraining
from autotune.measure.checks.split import measure_split
from autotune.measure.inspect import inspect_task
from autotune.measure.measurement import InspectOptions, MeasureOptions
from autotune.measure.run import measure
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.models.variant import Variant
from autotune.techniques.precision import Precision
from autotune.testing.models import Mlp
from autotune.testing.zoo import ZOO
from autotune.training.training import Training
from autotune.workers.trial.failure import outcome_of

STOCK = Plan(settings=Settings())


def by_step(training: Training) -> None:
    for batch in training.loader:
        training.step(batch)


def in_pieces(training: Training) -> None:
    for batch in training.loader:
        with training.forward_context():
            loss = training.model(batch).mean()
        training.backward(loss, batch)
        training.optimizer_step()


@pytest.mark.parametrize("loop", [by_step, in_pieces])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_they_are_called_once_a_step_on_true_gradients_and_after_the_optimizer(loop, precision):
    """0 to 3, and 4 and 5: gradients of 1.5 and 4.5, whatever accumulates and scales; clipped after that, to 1. The
    weight after each step is 0 and -1."""
    seen: list[Any] = []
    task = line(
        floats(6),
        max_grad_norm=1.0,
        after_backward=lambda model: seen.append(model.weight.grad.item()),
        after_step=lambda model: seen.append((round(model.weight.item(), 4), model.weight.grad)),
    )
    loop(training_of(task, batch=Batch(micro=2, accumulate=2), precision=Precision(kind=precision)))
    assert seen == [1.5, (0.0, None), 4.5, (-1.0, None)]


@pytest.mark.parametrize("loop", [by_step, in_pieces])
def test_gradients_may_be_changed_in_after_backward(loop):
    """Halved: 1 - 0.75 - 2.75."""
    task = line(floats(8), after_backward=lambda model: model.weight.grad.mul_(0.5))
    training = training_of(task, batch=Batch(micro=2, accumulate=2))
    loop(training)
    assert training.model.weight.item() == 1.0 - 0.75 - 2.75


def test_a_step_that_a_loss_scaler_skips_is_no_step():
    called = []
    samples = [torch.tensor(float("inf")), torch.tensor(1.0)]
    task = line(
        samples, after_backward=lambda model: called.append("backward"), after_step=lambda model: called.append("step")
    )
    by_step(training_of(task, batch=Batch(micro=1), precision=Precision(kind="fp16")))
    assert called == ["backward", "backward", "step"]


def fails(model: nn.Module) -> None:
    raise ValueError("no such layer")


@pytest.mark.parametrize("name", ["after_backward", "after_step"])
def test_what_they_raise_names_them(name):
    """In a job, and as a trial's outcome with the traceback of the user's own error."""
    training = training_of(line(floats(2), source="model.py", **{name: fails}), batch=Batch(micro=2))
    with pytest.raises(TaskError) as raised:
        by_step(training)
    assert str(raised.value) == f"model.py: {name}(model) raised ValueError: no such layer."
    outcome = outcome_of(raised.value, "cpu")
    assert outcome.message == str(raised.value)
    assert "in fails" in outcome.traceback


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_runs_out_in_them_is_the_configurations(error):
    def holds(model: nn.Module) -> None:
        raise error

    with pytest.raises(error):
        by_step(training_of(line(floats(2), after_step=holds), batch=Batch(micro=2)))


@pytest.mark.parametrize("name", ["after_backward", "after_step"])
def test_they_take_the_model(name):
    with pytest.raises(TaskError, match=rf"{name} takes \(\), but is called with \(model\)"):
        line(floats(2), **{name: lambda: None})


def test_a_trial_calls_them_once_a_step():
    """Parity's ten steps too: what is measured is what runs."""
    called = {"backward": 0, "step": 0, "optimizer": 0}

    def count(what: str) -> Any:
        def counted(*_: Any) -> None:
            called[what] += 1

        return counted

    task = line(floats(8), batch_size=4, after_backward=count("backward"), after_step=count("step"))
    training = training_of(task, batch=Batch(micro=2, accumulate=2))
    training.optimizer.register_step_post_hook(count("optimizer"))
    measure(training, task, MeasureOptions(trial_time_s=0.1, parity_batch=4))
    assert called["optimizer"] > 10
    assert called["backward"] == called["step"] == called["optimizer"]


def test_whether_a_split_changes_the_gradient_is_measured_without_them():
    """One that changes gradients is no difference of a split, nor is a step taken."""
    task = line(floats(4), after_backward=fails, after_step=fails)
    assert measure_split(task, task.build_model(), floats(4), torch.device("cpu")).error == 0.0


@pytest.mark.medium
def test_that_predictions_leave_them_out_is_said():
    """What they keep would be mixed with fake tensors."""
    task = line(floats(4), batch_size=4, after_step=lambda model: None)
    assert (
        "what after_step keeps in memory is measured, and not predicted"
        in inspect_task(task, InspectOptions(), "cpu").warnings
    )
    assert FakeTraining(STOCK, line(floats(4), batch_size=4, after_step=fails)).step(2).work is not None


@pytest.mark.parametrize("is_late", [False, True])
def test_a_weight_average_of_the_whole_model_is_told_where_to_be_made(is_late):
    """Made before the plan it has the shapes of a model of width 16, and the plan's is 8 wide. At the first call of
    ``after_step`` it is made of that."""
    whole = ZOO["mlp"]
    averages = [] if is_late else [AveragedModel(whole.build_model())]

    def after_step(model: nn.Module) -> None:
        if not averages:
            averages.append(AveragedModel(model))
        averages[0].update_parameters(model)

    task = dataclasses.replace(whole, after_step=after_step, variants={"narrow": lambda: Mlp(width=8)}, source="m.py")
    plan = Plan(settings=Settings(batch=Batch(micro=8), variant=Variant(kind="narrow")))
    raises = pytest.raises(TaskError, match=r"after_step\(model\) raised RuntimeError: .*\. The plan makes another")
    with nullcontext() if is_late else raises:
        by_step(autotune.apply(plan, task))
    assert not is_late or averages[0].module.stem.weight.shape == (8, 6)
    same = dataclasses.replace(task, after_step=fails)
    with pytest.raises(TaskError, match=r"raised ValueError: no such layer\.$"):
        by_step(autotune.apply(Plan(settings=Settings(batch=Batch(micro=8))), same))
