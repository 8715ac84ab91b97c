"""The reference keeps what a plain loop keeps; every other configuration what ``Training.step`` does."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from autotune.measure import MeasureOptions
from autotune.measure.run import as_in_a_plain_loop
from autotune.plan import Plan
from autotune.task_file import load_task
from autotune.techniques import Settings
from autotune.training.apply_plan import apply
from autotune.workers import Measured, MeasureRequest

TASK = str(Path(__file__).parents[1] / "tasks" / "keeps_losses.py")


def test_a_kept_loss_goes_when_the_next_one_is_there():
    """Before the next backward, as ``loss = ...`` in a loop: two are never kept."""
    losses: list[weakref.ref[torch.Tensor]] = []

    def compute_loss(model, batch):
        alive = [loss() is not None for loss in losses]
        assert alive == [False] * (len(losses) - 1) + [True] * bool(losses)
        loss = model(batch[0]).mean()
        losses.append(weakref.ref(loss))
        return loss

    task = load_task(TASK)
    task = as_in_a_plain_loop(type(task)(task.build_model, task.build_dataset, compute_loss, batch_size=4))
    training = apply(Plan(settings=Settings()), task)
    for batch in training.loader:
        training.step(batch)
    assert len(losses) == 16


@pytest.mark.parametrize("form", [lambda loss: loss, lambda loss: (loss, 2.0)], ids=["mean", "sum and count"])
def test_a_loop_in_pieces_keeps_no_graph(form):
    """A loss that is still there after backward has its value alone."""
    training, loss = in_pieces(lambda model, batch: model(batch[0]).sum())
    training.backward(form(loss))
    assert (loss.grad_fn, loss.requires_grad) == (None, False)
    assert all(parameter.grad is not None for parameter in training.model.parameters())
    assert training.optimizer_step()


def test_a_loss_that_is_a_view_stays_as_it_is():
    """Torch detaches no view in place; what comes of it steps all the same."""
    training, loss = in_pieces(lambda model, batch: model(batch[0]).sum(0, keepdim=True)[0, 0])
    training.backward(loss)
    assert loss.grad_fn is not None
    assert training.optimizer_step()


def in_pieces(compute_loss):
    """A training, and the loss of its first batch."""
    task = load_task(TASK)
    training = apply(Plan(settings=Settings()), type(task)(task.build_model, task.build_dataset, compute_loss))
    return training, compute_loss(training.model, next(iter(training.loader)))


@pytest.mark.medium
@pytest.mark.parametrize(("plain_loop", "said"), [(True, {"kept"}), (False, {"gone"})])
def test_a_trial_keeps_losses_where_it_is_asked_to(plain_loop, said, local_executor):
    options = MeasureOptions(trial_time_s=0.1, parity_batch=None, enforce=False, plain_loop=plain_loop)
    plan = Plan(settings=Settings())
    request = MeasureRequest(id="1", task=TASK, device="cpu", plan=plan, options=options, fresh=True)
    outcome = local_executor.submit(request).result()
    assert isinstance(outcome, Measured)
    assert set(outcome.output.split()) == said


def test_the_loops_that_the_reference_is_held_against_do_not_know_this_package():
    folder = Path(__file__).parents[2] / "benchmarks" / "jobs"
    assert [path.name for path in folder.glob("*.py") if "autotune" in path.read_text()] == []
