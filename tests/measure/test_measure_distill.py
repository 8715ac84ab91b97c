"""Distillation in recovery: the loss by hand, and what it cannot be had of."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from line_task import floats, line, training_of
from torch import Tensor, nn

from autotune.errors import TaskError
from autotune.measure.checks.distill import build_teacher, distilled
from autotune.training.training import Training


class Constant(nn.Module):
    """Says the same of each sample, whatever it is."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def task_of(**pieces):
    """Its loss is 1, and its weights say that the first of two classes is the likelier by ln 9."""
    weights = {"logits": torch.tensor([math.log(9.0), 0.0])}
    known = {"build_model": lambda: Constant(0.0, 0.0), "weights": lambda: weights}
    task = line(floats(4), compute_loss=lambda model, x: 0 * model(x).sum() + 1, batch_size=2)
    return dataclasses.replace(task, **{**known, **pieces})


def loss_of(training: Training) -> float:
    return training.step(next(iter(training.loader))).loss.item()


def test_half_of_the_loss_is_the_divergence_from_the_teacher():
    """At a temperature of 2 the teacher says 3/4 and 1/4, a student who knows nothing 1/2 each: the divergence is
    3/4 ln 3/2 + 1/4 ln 1/2 = 0.1308, times 4."""
    task = task_of()
    training = training_of(task)
    nn.init.zeros_(training.model.logits)
    taught = distilled(training, task, build_teacher(task))
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert loss_of(taught) == pytest.approx(0.5 * 1 + 0.5 * 4 * divergence, rel=1e-5)


def test_it_is_evaluated_at_the_batch_of_its_training():
    task = task_of(evaluate=lambda model, batch_size: 0.0)
    training = training_of(task)
    training.evaluation_batch = 64
    assert distilled(training, task, build_teacher(task)).evaluation_batch == 64


def test_who_says_what_the_teacher_says_learns_nothing_more():
    task = task_of()
    assert loss_of(distilled(training_of(task), task, build_teacher(task))) == pytest.approx(0.5)


def test_a_sum_with_its_count_stays_one():
    """The divergence of each of two samples, in a sum over both: the mean is as above."""
    task = task_of()
    summed = task_of(compute_loss=lambda model, x: (0 * model(x).sum() + 2, len(x)))
    means = []
    for one in (task, summed):
        training = training_of(one)
        nn.init.zeros_(training.model.logits)
        means.append(loss_of(distilled(training, one, build_teacher(one))))
    assert means[0] == pytest.approx(means[1])


def test_a_model_that_was_never_trained_has_nothing_to_teach():
    with pytest.raises(TaskError, match=r"--distill needs a model that has been trained\. Name its weights"):
        build_teacher(task_of(weights=None))


@pytest.mark.parametrize(
    ("loss", "student", "said"),
    [
        (lambda model, x: model(x).sum(), Constant(0.0, 0.0, 0.0), r"returns \(2, 3\) and the untouched one \(2, 2\)"),
        (lambda model, x: model.logits.sum(), Constant(0.0, 0.0), "needs compute_loss to call the model"),
    ],
)
def test_outputs_that_cannot_be_compared_are_told(loss, student, said):
    task = task_of(compute_loss=loss)
    training = training_of(task_of(build_model=lambda: student, weights=None, compute_loss=loss))
    with pytest.raises(TaskError, match=f"--distill .*{said}|{said}"):
        loss_of(distilled(training, task, build_teacher(task)))


def test_a_model_without_logits_is_told():
    class Pair(Constant):
        def forward(self, x: Tensor):
            return (self.logits, x)

    task = task_of(build_model=lambda: Pair(0.0, 0.0), compute_loss=lambda model, x: model(x)[0].sum())
    with pytest.raises(TaskError, match=r"needs a model that returns logits, .* but it returned tuple"):
        loss_of(distilled(training_of(task), task, build_teacher(task)))
