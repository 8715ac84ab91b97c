"""A cut is found in a process without CUDA, on a copy of the model."""

from __future__ import annotations

import torch
from stand_in import Card
from torch import nn

from autotune.measure.timing.disturbance import one_thread
from autotune.pruning import How, cut
from autotune.units import MIB


def test_a_model_that_fills_most_of_a_card_is_copied_to_the_host(card: Card) -> None:
    """Nothing is taken on the card on the way."""
    card.total_bytes, card.context_bytes = 20 * MIB, 2 * MIB
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2**18, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8))  # 12 MiB

    def run(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 2**18, device=next(model.parameters()).device)).sum()

    with one_thread():
        model.to("cuda")
        reserved_bytes = card.own_bytes
        found = cut(model, run, How(0.25))
    assert found.tensors
    assert card.own_bytes == reserved_bytes
