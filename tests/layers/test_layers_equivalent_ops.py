"""Modules that are written out by hand: which compute what torch has a function for, and which only look so."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from layer_runs import TOKENS, assert_same, run, twins
from torch import Tensor, nn
from torch.nn import functional as F

from autotune.layers import convert
from autotune.layers.equivalent_ops import find_equivalent_op


class Written(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Sometimes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + 0.1 * x if self.training else x.relu()


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + self.slope * x


LOOKALIKES: dict[str, Callable[[], nn.Module]] = {
    "clipped": lambda: Written(lambda x: x.clamp(0, 20)),
    "no gradient": lambda: Written(lambda x: x.relu().detach() + 0 * x),
    "in training": lambda: Sometimes().eval(),
    "annealed": Annealed,
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_module_that_only_looks_like_an_activation_is_its_own(name: str):
    stock, ours = twins(LOOKALIKES[name])
    for model in (stock, ours):
        model.train()
        model.slope = 0.5  # type: ignore[assignment]
    x = 40 * torch.randn(TOKENS)
    assert_same(run(ours, x), run(stock, x))


def test_looking_at_a_module_draws_no_random_numbers_and_calls_no_hook():
    model, calls = Written(lambda x: x + torch.randn_like(x)), []
    model.register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls


WRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), "gelu"),
    "gelu, tanh": (lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))), "gelu_tanh"),
    "silu": (lambda x: x * torch.sigmoid(x), "silu"),
    "relu": (lambda x: x.clamp(min=0), "relu"),
    "relu, never 0": (lambda x: F.relu(x) + 1e-6, None),
    "relu, within fp16": (lambda x: F.relu(x).clamp(max=65504.0), None),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), None),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_function_computes(name: str):
    function, wanted = WRITTEN[name]
    found = find_equivalent_op(Written(function))
    assert (None if found is None else found.name) == wanted


class Noted(nn.Module):
    """Keeps what it has seen, as tools that explain a model do."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return F.relu(x)


def test_a_module_that_notes_something_on_itself_is_its_own():
    model = convert(Noted())
    model(torch.ones(3, requires_grad=True))
    assert torch.equal(model.seen, torch.ones(3))


def test_a_function_that_is_exchanged_later_is_called():
    model = convert(Written(F.relu))
    model.function = torch.tanh
    x = torch.randn(4, requires_grad=True)
    assert torch.equal(model(x), torch.tanh(x))
