"""``data_loading``: its contract, and caches that give the batches of the plain loader."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from line_task import Stream, floats, line, training_of
from pydantic import ValidationError
from torch.utils._pytree import tree_leaves
from torch.utils.data import WeightedRandomSampler

from autotune.errors import PlanError
from autotune.techniques.data_loading import DataLoading
from autotune.testing.facts import BARE
from autotune.testing.techniques import TechniqueContract

HOST, DEVICE = DataLoading(cache="host"), DataLoading(cache="device")


class TestDataLoading(TechniqueContract):
    technique = DataLoading
    bitwise = True
    lacking = (HOST, DEVICE, DataLoading(num_workers=2), DataLoading(pin_memory=True))


class Point(NamedTuple):
    x: torch.Tensor
    y: float


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str


def rows(count: int, make) -> list:
    return [make(torch.tensor([float(index), -1.0]), index) for index in range(count)]


SAMPLES = {
    "tensors": rows(11, lambda x, i: x),
    "tuples": rows(11, lambda x, i: (x, i)),
    "named tuples": rows(11, lambda x, i: Point(x, i / 2)),
    "nested dicts": rows(11, lambda x, i: {"x": x, "more": {"flag": i > 3, "pair": (x, i)}}),
    "arrays": rows(11, lambda x, i: x.numpy()),
    "integers": rows(11, lambda x, i: i),
    "strings beside tensors": rows(11, lambda x, i: (x, f"sample {i}")),
    "more than one chunk": rows(300, lambda x, i: (x, i)),
}
PADDED = {
    "lengths that vary": rows(11, lambda x, i: x.repeat(1 + i % 3)),
    "dataclasses": rows(11, lambda x, i: Record(x, str(i))),
}


def collate(samples):
    tensors = [sample.x if isinstance(sample, Record) else sample for sample in samples]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def same(ours, theirs) -> bool:
    """Same structure, types, dtypes and values."""
    pairs = list(zip(tree_leaves(ours), tree_leaves(theirs), strict=True))
    return type(ours) is type(theirs) and all(
        (torch.equal(a, b) and a.dtype == b.dtype) if isinstance(b, torch.Tensor) else a == b for a, b in pairs
    )


def epochs(task, setting: DataLoading) -> list:
    loader = training_of(task, data_loading=setting).loader
    return [*loader, *loader]


@pytest.mark.parametrize("setting", [HOST, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_cache_gives_the_plain_loaders_batches(kind, setting):
    """Two shuffled epochs, in order, of the same structure, dtypes and values."""
    task = line(SAMPLES[kind], build_sampler=None, batch_size=4)
    if kind == "strings beside tensors" and setting == DEVICE:
        with pytest.raises(PlanError, match=r"the samples do not stack to one shape\. Use cache: host"):
            training_of(task, data_loading=setting)
        return
    pairs = list(zip(epochs(task, setting), epochs(task, DataLoading()), strict=True))
    assert all(same(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("setting", [HOST, DataLoading(num_workers=2, persistent_workers=True)])
@pytest.mark.parametrize("kind", PADDED)
def test_the_users_collate_stays(kind, setting):
    """From a list of cached samples, and in forked workers."""
    task = line(PADDED[kind], build_sampler=None, batch_size=4, collate=collate)
    pairs = zip(epochs(task, setting), epochs(task, DataLoading()), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


class Counted:
    """A dataset that counts its reads."""

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()
        self.weights = [1.0] * 6

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads[index] += 1
        return torch.tensor(float(index))


@pytest.mark.parametrize("setting", [HOST, DEVICE], ids=["host", "device"])
def test_a_cached_dataset_is_read_once(setting):
    dataset = Counted()
    epochs(line(dataset, batch_size=4), setting)
    assert dataset.reads == dict.fromkeys(range(6), 1)


def test_the_sampler_is_built_from_the_users_dataset():
    """A weighted sampler needs the dataset's own attributes, which a cache has not."""
    task = line(Counted(), build_sampler=lambda dataset: WeightedRandomSampler(dataset.weights, 6), batch_size=4)
    assert sum(len(batch) for batch in training_of(task, data_loading=HOST).loader) == 6


@pytest.mark.parametrize(
    "odd",
    [torch.zeros(1), torch.zeros(2, dtype=torch.int64), (torch.zeros(2),), "text"],
    ids=["shape", "dtype", "structure", "kind"],
)
def test_a_later_sample_of_another_kind_is_not_bent_into_shape(odd):
    """A chunk that differs from the first would be broadcast or converted: such samples are not stacked."""
    samples = [*rows(256, lambda x, i: x), odd]
    with pytest.raises(PlanError, match="do not stack"):
        training_of(line(samples), data_loading=DEVICE)
    loader = training_of(line(samples, batch_size=256), data_loading=HOST).loader
    assert same(list(loader)[1], next(iter(training_of(line([odd]), data_loading=DataLoading()).loader)))


def test_batches_of_a_cache_are_copies():
    """What the user does to a batch in place does not come back in the next epoch."""
    loader = training_of(line(floats(4), batch_size=4), data_loading=HOST).loader
    next(iter(loader)).zero_()
    assert next(iter(loader)).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_stream_cannot_be_cached():
    with pytest.raises(PlanError, match=r"an iterable dataset has no fixed epoch to keep\. Use cache: none"):
        training_of(line(Stream(floats(4))), data_loading=HOST)


def test_left_out_options_stay_the_users():
    """A plan that sets the workers alone keeps the user's prefetch factor; one without workers drops it."""
    task = line(floats(4), loader_options={"num_workers": 1, "prefetch_factor": 3})
    assert training_of(task, data_loading=DataLoading(num_workers=2)).loader.options["prefetch_factor"] == 3
    assert training_of(task, data_loading=DataLoading(num_workers=0)).loader.options["prefetch_factor"] is None
    assert training_of(task).loader.options["num_workers"] == 1


MAP = BARE.model_copy(
    update={
        "dataset_kind": "map",
        "dataset_deterministic": True,
        "stackable": True,
        "dataset_bytes": BARE.host_memory_bytes // 2,
    }
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dataset_kind": "iterable"}, "no fixed epoch"),
        ({"dataset_deterministic": False}, "augmentation"),
        ({"stackable": False}, "do not stack"),
        ({"dataset_bytes": BARE.host_memory_bytes // 2 + 1}, "exceed half of the device memory"),
    ],
)
def test_an_epoch_is_cached_where_it_may_be_and_fits(changes, reason):
    """On the device: fixed, read twice the same, stacking, and at most half of the memory."""
    found = DEVICE.unavailable(MAP.model_copy(update=changes))
    assert found is None if reason is None else reason in str(found)


def test_only_worker_counts_that_the_loader_gains_from_are_tried():
    """100, 150, 155 and 300 samples/s with 0 to 3 workers: 2 adds under a tenth to 1, so 0, 1 and 3."""
    facts = MAP.model_copy(update={"loader_samples_per_s": {0: 100.0, 1: 150.0, 2: 155.0, 3: 300.0}})
    choices = DataLoading.choices(facts)
    assert {choice.num_workers for choice in choices if choice.cache == "none"} == {None, 1, 3}


def test_what_the_user_has_already_is_not_offered_again():
    """One persistent worker with torch's prefetch of 2 is theirs: a prefetch of 4 remains."""
    own = {"num_workers": 1, "persistent_workers": True}
    facts = MAP.model_copy(update={"loader_samples_per_s": {0: 1.0, 1: 9.0}, "loader_options": own})
    with_workers = [choice for choice in DataLoading.choices(facts) if choice.num_workers]
    assert [choice.prefetch_factor for choice in with_workers] == [4]


def test_a_stream_that_shards_may_have_workers():
    two = DataLoading(num_workers=2)
    assert "once by each worker" in str(two.unavailable(BARE))
    assert two.unavailable(BARE.model_copy(update={"shards_by_worker": True})) is None


@pytest.mark.parametrize(
    "setting",
    [
        {"num_workers": 0, "prefetch_factor": 2},
        {"num_workers": 0, "persistent_workers": True},
        {"num_workers": 1, "cache": "host"},
    ],
)
def test_settings_that_contradict_each_other_are_refused(setting):
    with pytest.raises(ValidationError, match="num_workers"):
        DataLoading(**setting)
