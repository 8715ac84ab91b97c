"""Whether a split changes the gradient: measured, by the same arithmetic as a job's."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autotune.errors import TaskError
from autotune.measure.errors import NonFiniteLoss
from autotune.measure.split import measure_split
from autotune.randomness import seed_everything
from autotune.task import Task
from autotune.techniques.batch import SPLIT_TOLERANCE
from autotune.testing.zoo import ZOO

CPU = torch.device("cpu")
CHANGES = {"cnn", "resnet"}


def _measure(task, num_samples=16):
    seed_everything(0)
    model, dataset = task.build_model(), task.build_dataset()
    samples = list(dataset) if task is ZOO["stream"] else [dataset[index] for index in range(len(dataset))]
    return measure_split(task, model, samples[:num_samples], CPU), model


@pytest.mark.parametrize("name", sorted(ZOO.keys() - CHANGES))
def test_a_split_without_batch_statistics_is_exact(name):
    assert _measure(ZOO[name])[0].error < 1e-5


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_split_under_batch_norm_changes_the_gradient(name):
    assert _measure(ZOO[name])[0].error > 10 * SPLIT_TOLERANCE


def test_a_mean_over_tokens_changes_where_lengths_vary():
    """The same loss as (loss_sum, count) does not."""

    def mean_over_tokens(model, batch):
        loss, count = ZOO["token_loss"].compute_loss(model, batch)
        return loss / count

    averaged = dataclasses.replace(ZOO["token_loss"], compute_loss=mean_over_tokens)
    assert _measure(averaged)[0].error > 10 * SPLIT_TOLERANCE


def test_the_difference_by_hand():
    """loss = mean(x)^2 w: gradient 4 for (0, 3, 3); 2/3 * 1.5^2 + 1/3 * 3^2 = 4.5 in parts of 2 and 1: 12.5 % more."""
    model = nn.Linear(1, 1, bias=False)

    def compute_loss(model, batch):
        return batch.mean().square() * model.weight.sum()

    samples = [torch.tensor([0.0]), torch.tensor([3.0]), torch.tensor([3.0])]
    task = Task(lambda: model, lambda: samples, compute_loss)
    assert measure_split(task, model, samples, CPU).error == pytest.approx(0.125, rel=1e-6)


def test_parameters_statistics_and_gradients_are_left_as_they_were():
    seed_everything(0)
    before = ZOO["cnn"].build_model().state_dict()
    _, model = _measure(ZOO["cnn"])
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(p.grad is None for p in model.parameters())


def test_one_sample_cannot_be_split():
    found, _ = _measure(ZOO["mlp"], num_samples=1)
    assert (found.error, found.reason) == (None, "one sample cannot be split")


def test_a_model_of_one_batch_size_cannot_be_split():
    def compute_loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x.reshape(16, 6)), y)

    found, _ = _measure(dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss))
    assert found.error is None
    assert "RuntimeError on part of a batch" in found.reason


def test_a_loss_that_is_not_a_number_is_found_at_the_first_step():
    def compute_loss(model, batch):
        return ZOO["mlp"].compute_loss(model, batch) * float("inf")

    with pytest.raises(NonFiniteLoss) as caught:
        _measure(dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss))
    assert caught.value.step == 1


def test_a_loss_that_is_no_scalar_is_named():
    def compute_loss(model, batch):
        return model(batch[0])

    with pytest.raises(TaskError, match=r"scalar tensor.*shape \(16, 3\)"):
        _measure(dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss))


def test_a_loss_without_a_gradient_has_nothing_to_compare():
    model = nn.Linear(1, 1)
    samples = [torch.ones(1)] * 4
    spare = nn.Parameter(torch.zeros(1))
    task = Task(
        lambda: model, lambda: samples, lambda m, b: m(b).mean(), build_optimizer=lambda _: torch.optim.SGD([spare])
    )
    found = measure_split(task, model, samples, CPU)
    assert found.error is None
    assert found.reason == "no parameter of the optimizer gets a gradient"
