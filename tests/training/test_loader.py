"""``Loader``: micro-batches on the device, and where each stands in its optimizer step."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from line_task import Stream, floats, line, training_of
from torch.utils.data import Sampler

from autotune.data.loader import Loader
from autotune.errors import TaskError
from autotune.nested import tensors_in, to_device
from autotune.randomness import seed_everything
from autotune.techniques.batch import Batch
from autotune.techniques.data_loading import DataLoading

META = torch.device("meta")


def positions(loader: Loader) -> list[tuple[list[float], int, bool]]:
    return [(batch.tolist(), *loader.positions.take(batch)[:2]) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_partition_each_step(workers):
    """7 samples, 5 a step in 2 + 2 + 1: the tail of 2 ends a step of its own, with workers as without."""
    training = training_of(line(floats(7)), batch=Batch.of(5, 2), data_loading=DataLoading(num_workers=workers))
    expected = [([0, 1], 2, False), ([2, 3], 2, False), ([4], 1, True), ([5, 6], 2, True)]
    assert positions(training.loader) == expected
    assert positions(training.loader) == expected
    assert len(training.loader) == 4
    assert training.loader.num_samples == 7


@pytest.mark.parametrize("length", range(1, 12))
def test_its_length_is_its_number_of_micro_batches(length):
    loader = training_of(line(floats(length)), batch=Batch.of(5, 2)).loader
    assert len(loader) == len(list(loader))


def test_a_tail_is_dropped_where_the_users_loader_drops_it():
    """Ten samples in steps of four: the last two are left out, as their DataLoader leaves them out."""
    task = line(floats(10), loader_options={"drop_last": True})
    loader = training_of(task, batch=Batch(micro=3, accumulate=2, effective=4)).loader
    assert len(loader) == 4
    assert [samples for samples, *_ in positions(loader)] == [[0.0, 1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0]]


def test_an_epoch_that_was_left_does_not_reach_into_the_next():
    """Workers have asked ahead for batches that nobody takes."""
    setting = DataLoading(num_workers=2, persistent_workers=True)
    loader = training_of(line(floats(8)), batch=Batch.of(4, 2), data_loading=setting).loader
    next(iter(loader))
    assert [position[1:] for position in positions(loader)] == [(2, False), (2, True)] * 2


def test_the_last_batch_of_a_stream_ends_its_step():
    loader = training_of(line(Stream(floats(5))), batch=Batch(micro=2, accumulate=2)).loader
    assert positions(loader) == [([0, 1], 2, False), ([2, 3], 2, True), ([4], 1, True)]


def test_samples_of_a_stream_are_counted_and_not_read_off_a_tensor():
    """Three graphs of 2 nodes each are three samples, though the batch's tensor has 6 rows."""
    graphs = Stream([torch.zeros(2, 4) for _ in range(3)])
    training = training_of(line(graphs, collate=torch.cat), batch=Batch(micro=3))
    assert [len(batch) for batch in training.loader] == [6]
    assert training.loader.position.num_samples == 3


def test_an_empty_stream_is_an_empty_dataset():
    with pytest.raises(TaskError, match="an empty dataset"):
        list(training_of(line(Stream([]))).loader)


def test_a_sampler_hears_of_the_epoch():
    """As a distributed sampler must, to shuffle anew."""

    class Heard(Sampler[int]):
        def __init__(self, dataset) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self):
            return iter([0])

    samplers = []
    task = line(floats(1), build_sampler=lambda dataset: samplers.append(Heard(dataset)) or samplers[0])
    loader = training_of(task).loader
    assert [len(list(loader)) for _ in range(2)] == [1, 1]
    assert samplers[0].epochs == [0, 1]


def test_a_shuffle_differs_from_epoch_to_epoch_and_repeats_with_the_seed():
    first, again = (training_of(line(floats(20), build_sampler=None, batch_size=20)).loader for _ in range(2))
    epochs = [[batch.tolist() for batch in loader] for loader in (first, first, again, again)]
    assert epochs[0] != epochs[1]
    assert epochs[:2] == epochs[2:]
    assert sorted(epochs[1][0]) == list(range(20))


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    size: int = dataclasses.field(init=False, default=3)


class Own:
    """A batch class with a ``to`` of its own, which knows no keywords."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device) -> Own:
        return Own(self.x.to(device))


X = torch.zeros(2)
NESTED = {
    "dict": {"a": X, "b": [X, 3]},
    "ordered dict": OrderedDict(a=X),
    "defaultdict": defaultdict(list, {"a": X}),
    "named tuple": Pair(X, 1),
    "tuple": (X, "text", None),
    "dataclass": [Record(X)],
}


@pytest.mark.parametrize("kind", NESTED)
def test_nested_batches_are_moved_as_what_they_are(kind):
    """Every tensor is on the device, everything else and the containers' types are as before."""
    batch = NESTED[kind]
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert {tensor.device for tensor in tensors_in(moved)} == {META}
    assert len(list(tensors_in(moved))) == len(list(tensors_in(batch)))
    assert {tensor.device.type for tensor in tensors_in(batch)} == {"cpu"}


def test_batches_move_themselves_where_they_can():
    assert to_device(Own(X), META).x.device == META
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(2, 1)])
    assert to_device(packed, META).data.device == META
    assert to_device(MappingProxyType({"a": X}), META)["a"].device == META
    assert to_device(Pair(X, 1), META).y == 1
    assert to_device(Record(X), META).size == 3
    assert to_device(defaultdict(list), META)["new"] == []


def test_persistent_workers_end_with_their_loader():
    """Dropping the training ends them at once, without the garbage collector, which would make each wait for 5 s."""
    setting = DataLoading(num_workers=1, persistent_workers=True)
    training = training_of(line(floats(4)), data_loading=setting)
    assert len(list(training.loader)) == 1
    (worker,) = training.loader._data._iterator._workers
    assert worker.is_alive()
    del training
    assert worker._closed or not worker.is_alive()


@pytest.mark.medium
def test_workers_end_by_themselves_where_the_garbage_collector_ends_them(monkeypatch):
    """In a cycle of the user's: torch kills none, for which it would first have waited for 5 s."""
    setting = DataLoading(num_workers=2, persistent_workers=True)
    training = training_of(line(floats(4)), data_loading=setting)
    assert len(list(training.loader)) == 1
    workers = training.loader._data._iterator._workers
    killed = []
    monkeypatch.setattr(type(workers[0]), "terminate", killed.append)
    training.itself = training
    del training
    gc.collect()
    assert killed == []
    assert not any(worker.is_alive() for worker in workers)


class Augmented:
    """Samples with a number from each generator, from the first of them on, or from a later one."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index < self.first:
            return torch.zeros(4)
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()])


def drawn(dataset: Augmented, stays: bool, **settings: DataLoading) -> tuple[torch.Tensor, float]:
    """Three epochs of a task with two loader workers, and the process's next number."""
    options = {"num_workers": 2, "persistent_workers": stays}
    loader = training_of(line(dataset, batch_size=1, loader_options=options), **settings).loader
    seed_everything(0)
    return torch.stack([torch.cat([*loader]) for _ in range(3)]), torch.rand(()).item()


@pytest.mark.parametrize("stays", [False, True])
def test_without_the_users_workers_samples_are_drawn_as_in_them(stays):
    """In each epoch, and the process draws nothing of its own."""
    samples, after = drawn(Augmented(), stays)
    found, after_found = drawn(Augmented(), stays, data_loading=DataLoading(num_workers=0))
    assert len(samples.unique()) > 3 * 60
    torch.testing.assert_close(found, samples, rtol=0, atol=0)
    assert after_found == after


def test_a_dataset_that_begins_to_draw_after_16_batches_draws_of_the_process():
    """What drew nothing until then is read as it is, since keeping generators apart takes time."""
    samples, after = drawn(Augmented(first=16), False)
    found, after_found = drawn(Augmented(first=16), False, data_loading=DataLoading(num_workers=0))
    assert not torch.equal(found, samples)
    assert after_found != after
    samples, after = drawn(Augmented(first=15), False)
    found, after_found = drawn(Augmented(first=15), False, data_loading=DataLoading(num_workers=0))
    torch.testing.assert_close(found, samples, rtol=0, atol=0)
    assert after_found == after


class Drawn:
    """A dataset of one's own, whose samples are drawn anew now and then."""

    def __init__(self) -> None:
        self.values = [0.0, 1.0, 2.0, 3.0]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return self.values[index]


@pytest.mark.parametrize(
    "setting", [DataLoading(num_workers=0, cache="host"), DataLoading(num_workers=1, persistent_workers=True)]
)
def test_a_dataset_that_is_another_in_the_next_epoch_is_read_anew(setting):
    dataset = Drawn()
    loader = training_of(line(dataset, batch_size=4), data_loading=setting).loader
    (before,), (again,) = loader, loader
    dataset.values = [4.0, 5.0, 6.0, 7.0]
    with pytest.warns(UserWarning, match="no workers are kept from here on: Drawn: its attributes have changed"):
        (after,) = loader
    assert [one.tolist() for one in (before, again, after)] == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    dataset.values = [8.0, 9.0, 10.0, 11.0]
    assert next(iter(loader)).tolist() == [8, 9, 10, 11]
