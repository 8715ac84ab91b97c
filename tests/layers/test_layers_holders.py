"""Where others keep a tensor anyway, nothing is kept on top: beside what test_layers_saved_by shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from layer_runs import TOKENS, run, twins
from torch import Tensor, nn
from torch.nn import functional as F


class Calls(nn.Module):
    """A function of x, and a frozen and a trained layer."""

    def __init__(self, function: Callable[[Calls, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.frozen, self.trained = (nn.Linear(32, 32) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


INPUTS: dict[str, Callable[[Calls, Tensor], Tensor]] = {
    "gelu, a power": lambda own, x: own.frozen(F.gelu(x)) + x.pow(2),
    "silu, a layer": lambda own, x: (lambda h: own.frozen(F.silu(h)) + own.trained(h))(own.first(x)),
    "leaky relu of a softmax": lambda own, x: F.leaky_relu(torch.softmax(x, -1), 0.2),
    "hardtanh, a product": lambda own, x: F.hardtanh(x) + x * x,
    "relu6, a layer": lambda own, x: (lambda h: F.relu6(h) + own.trained(h))(own.first(x)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_another_keeps_is_all_that_is_kept(name: str):
    stock, ours = twins(lambda: Calls(INPUTS[name]), example=torch.randn(TOKENS), rounding=True)
    for model in (stock, ours):
        model.frozen.requires_grad_(False)
    x = torch.randn(TOKENS)
    assert run(ours, x).kept <= run(stock, x).kept


def test_weights_that_were_replaced_are_taken_to_train():
    stock, ours = twins(
        lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), example=torch.randn(TOKENS)
    )
    ours.load_state_dict({name: value.clone() for name, value in stock.state_dict().items()}, assign=True)
    x = torch.randn(TOKENS)
    assert run(ours, x).kept == run(stock, x).kept


class Loss(nn.Module):
    """A head over so few rows that the gradient of its weight, in fp32, is larger than the logits in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x.bfloat16()), torch.arange(len(x)))


@pytest.mark.parametrize("num_rows", [40, 64])
def test_a_head_in_bf16_keeps_no_more(num_rows: int):
    stock, ours = twins(lambda: Loss().bfloat16())
    x = torch.randn(num_rows, 32)
    assert run(ours, x).kept <= run(stock, x).kept


def test_a_norm_of_what_wants_no_gradient_keeps_no_more():
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x.detach().clone()
            hidden += self.linear(self.norm(hidden))  # in place: stock does not need it
            return hidden

    stock, ours = twins(Embedded)
    x = torch.randn(TOKENS)
    wanted, found = run(stock, x), run(ours, x)
    assert found.kept <= wanted.kept
    assert torch.equal(found.output, wanted.output)
