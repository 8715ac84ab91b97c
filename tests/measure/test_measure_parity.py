"""Parity: ten steps on the same samples, whatever the configuration, and how far they stray."""

import dataclasses
import random

import pytest
import torch
from line_task import floats, line, training_of
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from autotune.errors import TaskError
from autotune.measure import MeasureOptions
from autotune.measure.checks.parity import NUM_STEPS, compare, rounded_losses, run_parity
from autotune.measure.errors import NonFiniteLoss
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.testing.zoo import BATCH_SIZE, ZOO
from autotune.training.apply_plan import apply

EXACTLY_SPLIT = sorted(ZOO.keys() - {"cnn", "resnet", "stream"})


def _parity(task, settings=None, reference=None, limit=0.01, after_step=lambda step: None):
    training = apply(Plan(settings=settings or Settings()), task)
    options = MeasureOptions(parity_batch=BATCH_SIZE, reference_losses=reference, parity_limit=limit)
    return run_parity(training, task, options, after_step)


def _split(micro):
    return Settings(batch=Batch.of(BATCH_SIZE, micro))


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_job_agrees_with_itself_to_the_last_bit(name):
    reference = _parity(ZOO[name])
    again = _parity(ZOO[name], reference=reference.losses)
    assert len(reference.losses) == NUM_STEPS
    assert again.losses == reference.losses
    assert (again.deviation, again.strayed_at) == (0.0, None)


@pytest.mark.parametrize("name", EXACTLY_SPLIT)
def test_splitting_a_batch_leaves_the_losses(name):
    """Uneven micro-batches of 3, 3 and 2, with dropout in the model, and over the end of an epoch."""
    found = _parity(ZOO[name], _split(3), _parity(ZOO[name]).losses)
    assert found.deviation < 1e-5


def test_a_stream_is_cut_into_equal_micro_batches():
    """3 does not divide 8: 2 is the largest below it that does."""
    reference = _parity(ZOO["stream"])
    found = _parity(ZOO["stream"], Settings(batch=Batch(micro=3)), reference.losses)
    assert found.deviation < 1e-5


def test_a_larger_batch_of_the_trial_does_not_change_the_parity_run():
    reference = _parity(ZOO["mlp"])
    assert _parity(ZOO["mlp"], Settings(batch=Batch(micro=16)), reference.losses).deviation == 0.0


def test_splitting_under_batch_norm_strays_and_names_the_step():
    found = _parity(ZOO["resnet"], _split(3), _parity(ZOO["resnet"]).losses)
    assert found.deviation > 0.01
    assert 1 <= found.strayed_at <= NUM_STEPS


def test_checkpointing_with_dropout_strays_nowhere():
    reference = _parity(ZOO["gpt"])
    found = _parity(ZOO["gpt"], Settings(checkpointing={"kind": "blocks"}), reference.losses)
    assert found.deviation < 1e-6


class Augmented(Dataset):
    """Vectors with noise from two generators, drawn anew each time a sample is read."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.full((4,), index / 21) + torch.randn(4), random.random()


class AugmentedStream(IterableDataset):
    def __iter__(self):
        return iter(Augmented()[index] for index in range(21))


class NoisyModel(nn.Module):
    """Adds noise of its own in the forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x + 0.1 * torch.rand(x.shape))


def _noisy_task(dataset):
    def compute_loss(model, batch):
        x, y = batch
        return (model(x).squeeze(1) - y).square().mean()

    return Task(NoisyModel, dataset, compute_loss, batch_size=BATCH_SIZE)


@pytest.mark.parametrize("dataset", [Augmented, AugmentedStream])
def test_augmentation_and_noise_agree_however_a_step_is_cut(dataset):
    task = _noisy_task(dataset)
    found = _parity(task, _split(4), _parity(task).losses)
    assert found.deviation < 1e-5


def test_loader_workers_do_not_change_what_is_read():
    task = _noisy_task(Augmented)
    found = _parity(task, Settings(data_loading={"num_workers": 2}), _parity(task).losses)
    assert found.deviation == 0.0


def test_the_rest_of_the_trial_draws_as_if_there_had_been_no_parity():
    task = _noisy_task(Augmented)
    training = apply(Plan(settings=Settings()), task)
    before = torch.get_rng_state()
    run_parity(training, task, MeasureOptions(parity_batch=BATCH_SIZE))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_over_counts_is_averaged_over_counts():
    """The step's mean is that of its tokens, not of its micro-batches' means."""
    whole = _parity(ZOO["token_loss"]).losses
    parts = _parity(ZOO["token_loss"], _split(1)).losses
    assert parts == pytest.approx(whole, rel=1e-5)


def test_not_a_number_is_named_with_its_step():
    calls = iter(range(100))

    def compute_loss(model, batch):
        loss = ZOO["mlp"].compute_loss(model, batch)
        return loss * float("nan") if next(calls) == 3 else loss

    with pytest.raises(NonFiniteLoss) as caught:
        _parity(dataclasses.replace(ZOO["mlp"], compute_loss=compute_loss))
    assert caught.value.step == 4
    assert caught.value.value != caught.value.value


def test_each_step_is_told():
    seen = []
    _parity(ZOO["mlp"], after_step=seen.append)
    assert seen == list(range(1, NUM_STEPS + 1))


def test_deviation_is_the_largest_difference_over_the_references_mean():
    """Reference mean 2; differences 0, 0.3, 0.8: 40 % at the third step, the first beyond 3 times 10 %."""
    found = compare([1.0, 2.3, 3.8], [1.0, 2.0, 3.0], limit=0.1)
    assert found.deviation == pytest.approx(0.4)
    assert found.strayed_at == 3


def test_a_reference_of_zeros_is_compared_as_it_is():
    assert compare([0.0, 0.5], [0.0, 0.0], limit=0.1).strayed_at == 2


@pytest.mark.parametrize("count", [0, torch.tensor(0), -4, float("nan")])
def test_a_sum_over_a_count_that_cannot_be_is_refused(count):
    """Undivided, it would train with gradients that are wrong by the count, and no loss would show it."""
    task = ZOO["mlp"]
    wrong = dataclasses.replace(task, compute_loss=lambda model, batch: (task.compute_loss(model, batch) * 8, count))
    with pytest.raises(TaskError, match=r"a count of .*Wanted: the number of samples or tokens"):
        _parity(wrong)


def test_micro_batches_without_a_valid_token_are_no_error():
    """Their sum is 0, and so is their count."""
    task = ZOO["mlp"]
    empty = dataclasses.replace(task, compute_loss=lambda model, batch: (task.compute_loss(model, batch) * 0, 0))
    assert set(_parity(empty).losses) == {0.0}


def test_what_rounds_may_be_off_by_three_times_what_rounded_weights_are():
    """A job whose loss is nearly 0: rounding its weights once moves the second loss by 5 %. So 15 % there is rounding,
    as is what comes after it, and 16 % is not; without it, the limit at step 2 is 4 %."""
    reference, rounded = [1.0, 1.0, 1.0], [1.0, 1.05, 1.0]
    assert compare([1.0, 1.149, 1.149], reference, 0.02, rounded).strayed_at is None
    assert compare([1.0, 1.16, 1.0], reference, 0.02, rounded).strayed_at == 2
    assert compare([1.03, 1.0, 1.0], reference, 0.02, rounded).strayed_at == 1
    assert compare([1.0, 1.05, 1.0], reference, 0.02).strayed_at == 2


def test_rounded_weights_of_a_model_that_bfloat16_holds_lose_nothing():
    """A weight of 1 is 1 in bfloat16; one of 1 + 2**-9 is not, and its losses are another's."""
    task = line(floats(16), batch_size=1)
    options = MeasureOptions(parity_batch=1)
    stock = run_parity(training_of(task), task, options).losses
    assert rounded_losses(training_of(task), task, options) == stock
    training = training_of(task)
    training.model.weight.data += 2**-9
    assert rounded_losses(training, task, options) == stock
