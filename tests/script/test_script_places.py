"""A script's datasets are recognised from epoch to epoch, and none is kept for that."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune.plan import Plan
from autotune.script.plan.loaders import Loaders
from autotune.techniques import Settings
from autotune.techniques.data_loading import DataLoading


def read(loaders: Loaders, dataset: Any) -> DataLoader[Any]:
    """A new loader of it, about to be iterated over."""
    loader: DataLoader[Any] = DataLoader(dataset, 2)
    loaders.begin_epoch(loader, lambda apply: apply(), is_named=False)
    return loader


@pytest.mark.parametrize("row", [DataLoading(), DataLoading(num_workers=1)])
def test_a_dataset_made_anew_for_each_evaluation_goes_with_its_loader(row: DataLoading):
    """Whether a row of data loading is put on its loader or not."""
    loaders, trained_on = Loaders(Plan(settings=Settings(data_loading=row))), TensorDataset(torch.zeros(4))
    read(loaders, trained_on)
    for _ in range(3):
        evaluated = TensorDataset(torch.zeros(8))
        gone = weakref.ref(evaluated)
        read(loaders, evaluated)
        del evaluated
        gc.collect()
        assert gone() is None


def test_a_new_loader_of_a_dataset_has_its_place():
    """Each of a type that can be referred to weakly, or not."""
    loaders = Loaders(Plan(settings=Settings()))
    first, second = TensorDataset(torch.zeros(4)), [torch.zeros(1)] * 4
    found = [loaders.named(read(loaders, dataset)) for dataset in (first, second, first, second)]
    assert [one.place for one in found if one is not None] == [0, 1, 0, 1]
    assert [one.dataset for one in found if one is not None] == ["TensorDataset", "list"] * 2
