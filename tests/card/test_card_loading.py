"""A dataset whose samples are on the card, or that reads one there: only the training process can."""

from __future__ import annotations

import torch
from stand_in import Card
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from autotune.measure.inspect import inspect_task
from autotune.measure.measurement import InspectOptions
from autotune.task import Task
from autotune.techniques import Facts
from autotune.techniques.data_loading import DataLoading
from autotune.testing.zoo import ZOO


def _facts(card: Card, dataset: Dataset[tuple[Tensor, ...]]) -> Facts:
    card.launch_s = 0.01  # the loader is timed for half a second
    task = Task(**{**vars(ZOO["mlp"]), "build_dataset": lambda: dataset})
    return inspect_task(task, InspectOptions(), "cuda")


def _samples() -> list[Tensor]:
    torch.manual_seed(0)
    whole = ZOO["mlp"].build_dataset()
    return [torch.stack(column) for column in zip(*(whole[index] for index in range(len(whole))), strict=True)]


def test_samples_that_are_on_the_card_are_loaded_by_the_training_process(card: Card) -> None:
    """No worker is tried, none is offered, nothing is pinned, and the whole epoch may lie on the card."""
    facts = _facts(card, TensorDataset(*(column.to("cuda") for column in _samples())))
    assert facts.samples_on_device
    assert list(facts.loader_samples_per_s) == [0]
    assert DataLoading.choices(facts) == (DataLoading(), DataLoading(num_workers=0, cache="device"))
    for refused in (DataLoading(num_workers=2), DataLoading(pin_memory=True)):
        assert "on the device already" in (refused.unavailable(facts) or "")


class Indexing(Dataset[tuple[Tensor, ...]]):
    """Samples are on the host, and what says which is on the card."""

    def __init__(self) -> None:
        self.columns = _samples()
        self.order = torch.arange(len(self.columns[0]), device="cuda")

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[int(self.order[index])] for column in self.columns)


def test_a_dataset_that_fails_in_a_worker_is_loaded_without(card: Card) -> None:
    facts = _facts(card, Indexing())
    assert not facts.samples_on_device
    assert list(facts.loader_samples_per_s) == [0]
    assert any(
        one.startswith("1 loader worker is not tried, nor are more:") and "Cannot re-initialize CUDA" in one
        for one in facts.warnings
    ), facts.warnings
