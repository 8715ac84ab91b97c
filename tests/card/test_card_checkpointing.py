"""Blocks that are computed again on a card: torch keeps the random state of those cards alone that it finds tensors
of among a block's positional arguments (torch 2.13, utils/checkpoint.py, get_device_states)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from autotune.techniques.checkpointing import Checkpointing


class Dropping(nn.Module):
    """A linear layer under dropout, whose mask comes from the card's own generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), generator

    def forward(self, hidden, inner=None):
        out = self.linear(hidden if inner is None else inner["hidden"])
        return out * torch.bernoulli(torch.full_like(out, 0.5), generator=self.generator)


@pytest.fixture
def generator(monkeypatch) -> torch.Generator:
    """A card's: torch is told that there is one, and that tensors are on it."""
    own = torch.Generator().manual_seed(1)

    def get_device_states(*args: object) -> tuple[list[int], list[Tensor]]:
        return [], [own.get_state()] if any(isinstance(one, Tensor) for one in tree_leaves(args)) else []

    def set_device_states(devices: list[int], states: list[Tensor], *, device_type: str) -> None:
        for state in states:
            own.set_state(state)

    monkeypatch.setattr(torch.cpu, "_initialized", True, raising=False)
    monkeypatch.setattr(checkpoint, "get_device_states", get_device_states)
    monkeypatch.setattr(checkpoint, "set_device_states", set_device_states)
    return own


@pytest.mark.parametrize("call", ["positional", "keyword", "inside a keyword"])
def test_dropout_on_a_card_is_the_same_when_it_is_computed_again(generator, call):
    """Gradients are those of the model that keeps everything, however the block is called."""
    gradients = []
    for kind in ("none", "blocks"):
        torch.manual_seed(0)
        generator.manual_seed(1)
        block = Dropping(generator)
        Checkpointing(kind=kind).on_model(block, [block])
        x = torch.randn(8, 4, requires_grad=True)
        match call:
            case "positional":
                out = block(x)
            case "keyword":
                out = block(hidden=x)
            case _:
                out = block(hidden=None, inner={"hidden": x})
        out.square().sum().backward()
        gradients.append([x.grad, block.linear.weight.grad])
    assert all(map(torch.equal, *gradients))
