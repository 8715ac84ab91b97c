"""Micro-batches for ever, from epochs of any kind."""

import itertools

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from autotune.apply_plan import build_loader
from autotune.errors import TaskError
from autotune.measure.feed import Feed
from autotune.task import Task
from autotune.techniques import LoaderSpec
from autotune.techniques.batch import Batch

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
