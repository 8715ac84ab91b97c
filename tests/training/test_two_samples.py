"""What is looked at on two samples leaves a job as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate

from autotune.training.apply_pieces import on_two_samples


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch + torch.rand(batch.shape))


def test_it_runs_on_the_first_two_and_nothing_random_has_moved():
    run = on_two_samples([torch.full((3,), float(number)) for number in range(5)], default_collate, loss)
    model = nn.Linear(3, 4)
    before = torch.get_rng_state()
    assert run(model).shape == (2, 4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("dataset", "collate"), [(Stream(), default_collate), ([], default_collate), ([torch.ones(3)], None)]
)
def test_where_samples_are_read_once_or_there_are_none_nothing_runs(dataset, collate):
    assert on_two_samples(dataset, collate, loss) is None
