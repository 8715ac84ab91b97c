"""Micro-batches for ever, from epochs of any kind."""

import itertools
import warnings

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from autotune.errors import TaskError
from autotune.measure.feed import Feed, repeated
from autotune.measure.steps import Steps
from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import LoaderSpec, Settings
from autotune.techniques.batch import Batch
from autotune.testing.zoo import ZOO
from autotune.training.apply_plan import apply, build_loader

CPU = torch.device("cpu")


class Stream(IterableDataset):
    def __init__(self, length):
        self._length = length

    def __iter__(self):
        return iter(torch.arange(self._length))


def _feed(dataset, batch, **entries):
    task = Task(lambda: None, lambda: dataset, lambda model, batch: None, **entries)
    spec = LoaderSpec(dataset, task.collate, dict(task.loader_options), CPU, user_dataset=dataset)
    return Feed(build_loader(task, spec, batch))


def _numbers(length):
    return TensorDataset(torch.arange(length))


def _next_values(feed):
    batch, _ = feed.next()
    return (batch[0] if isinstance(batch, list) else batch).tolist()


def test_every_epoch_is_read_whole_and_the_next_follows():
    feed = _feed(_numbers(5), Batch(micro=2))
    epochs = [sorted(itertools.chain.from_iterable(_next_values(feed) for _ in range(3))) for _ in range(3)]
    assert epochs == [[0, 1, 2, 3, 4]] * 3


def test_a_stream_of_one_batch_goes_on():
    feed = _feed(Stream(3), Batch(micro=4))
    assert [_next_values(feed) for _ in range(4)] == [[0, 1, 2]] * 4
    assert feed.epoch_samples == 3


def test_a_step_is_its_micro_batches_up_to_the_last():
    feed = _feed(_numbers(5), Batch(micro=2, accumulate=2))
    assert [[position.num_samples for _, position in feed.step()] for _ in range(3)] == [[2, 2], [1], [2, 2]]


def test_the_largest_of_some_batches_is_the_first_with_most_elements_of_one_epoch():
    """An epoch of 4, 3, 5 and 5 numbers; the first of the next may be looked at, too."""
    rows = [torch.arange(length) for length in (4, 3, 5, 5)]
    entries = {"build_sampler": lambda dataset: range(4)}
    feeds = [_feed(rows, Batch(micro=1), **entries) for _ in range(3)]
    sizes = [feed.largest_of(count).numel() for feed, count in zip(feeds, (2, 3, 100), strict=True)]
    assert (sizes, [feed.num_batches for feed in feeds]) == ([4, 5, 5], [2, 3, 5])


def test_a_step_of_one_batch_over_and_over_ends_with_its_last():
    """Each is known for the loader's own, and what was read before waits no longer."""
    feed = _feed(_numbers(8), Batch(micro=2, accumulate=2))
    loader = feed._loader
    (batch, _), _ = feed.next(), feed.next()
    taken = [loader.positions.take(one) for one, _ in repeated(loader, batch)]
    assert [(position.num_samples, position.ends_step) for position in taken] == [(2, False), (2, True)]
    assert loader.positions.take() is None


def test_repeating_a_batch_is_no_surprise_to_the_training():
    """It takes each for a micro-batch of its loader's, and not for a stranger that it has to warn of."""
    training = apply(Plan(settings=Settings(batch=Batch.of(8, 4))), ZOO["mlp"])
    steps = Steps(training)
    batch = steps.feed.largest_of(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps.repeat(batch)
    assert steps.num_steps == 1


def test_opening_early_loses_no_batch():
    feed = _feed(Stream(4), Batch(micro=2))
    feed.open()
    assert [_next_values(feed) for _ in range(2)] == [[0, 1], [2, 3]]


def test_positions_survive_an_early_opening():
    feed = _feed(_numbers(4), Batch(micro=2, accumulate=2))
    feed.open()
    assert [feed.next()[1].ends_step for _ in range(4)] == [False, True, False, True]


def test_a_stream_that_has_not_ended_has_no_known_length():
    feed = _feed(Stream(100), Batch(micro=2))
    feed.next()
    assert feed.epoch_samples is None


def test_a_restart_is_seen_and_begins_at_the_beginning():
    feed = _feed(Stream(10), Batch(micro=2))
    feed.next()
    assert not feed.has_restarted
    feed.restart()
    assert feed.has_restarted
    assert _next_values(feed) == [0, 1]


def test_persistent_workers_can_be_restarted_within_an_epoch():
    options = {"num_workers": 1, "persistent_workers": True}
    feed = _feed(Stream(40), Batch(micro=2), loader_options=options)
    feed.next()
    feed.restart()
    assert _next_values(feed) == [0, 1]


def test_a_sampler_without_indices_is_named():
    feed = _feed(_numbers(4), Batch(micro=2), build_sampler=lambda dataset: [])
    with pytest.raises(TaskError, match="sampler without indices"):
        feed.next()


def test_an_error_in_a_worker_is_the_users():
    class Broken(TensorDataset):
        def __getitem__(self, index):
            raise KeyError("sample 7 is broken")

    feed = _feed(Broken(torch.arange(8)), Batch(micro=2), loader_options={"num_workers": 1})
    with pytest.raises(KeyError, match="sample 7 is broken"):
        feed.next()
