"""Converted layers on a card: few launches, nothing that waits for it, and stock's gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_in import Card
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.internals.fake_tensors import PlannedMode
from autotune.layers import bits, convert


class _Launches(TorchDispatchMode):
    """Operations by name, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return found


class Ran:
    """A forward and backward pass on the card, and what it took."""

    def __init__(self, card: Card, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> None:
        x = x.clone(memory_format=torch.preserve_format).to("cuda").requires_grad_()
        num_waits = len(card.waits)
        with _Launches() as launches:
            value = loss(model, x * 1.0)
            value.backward(torch.ones_like(value))
        self.value, self.launches, self.waits = value.detach(), launches.counts, list(card.waits[num_waits:])
        self.gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]


def twins(card: Card, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> Iterator[Ran]:
    """As it is, and converted."""
    torch.manual_seed(0)
    model = model.to("cuda")
    converted = convert(copy.deepcopy(model), recompute=True)
    yield Ran(card, model, loss, x)
    yield Ran(card, converted, loss, x)


POOLS = {
    "halves": (nn.MaxPool2d(2), (2, 3, 8, 8)),
    "padded": (nn.MaxPool2d(3, 2, 1), (2, 3, 9, 8)),
    "dilated": (nn.MaxPool2d((3, 2), 1, (1, 0), (2, 3)), (2, 3, 9, 8)),
    "narrower than the window": (nn.MaxPool2d(3, 1, 1), (2, 3, 1, 1)),
    "a column": (nn.MaxPool2d(3, 1, 1), (2, 3, 5, 1)),
    "of volumes": (nn.MaxPool3d(2, 2, 1, ceil_mode=True), (2, 3, 4, 5, 6)),
    "of lines": (nn.MaxPool1d(3, 2), (2, 3, 16)),
}


@pytest.mark.parametrize("name", [*POOLS, "channels last"])
def test_a_maximum_takes_one_turn_and_waits_for_nothing(card: Card, name: str):
    """Whatever the window; of elements that are alike the first has the gradient, as in stock."""
    pool, size = POOLS.get(name, POOLS["padded"])
    memory_format = torch.channels_last if name == "channels last" else torch.contiguous_format
    x = torch.randint(0, 4, size).float().to(memory_format=memory_format)
    x[0, 0] = -torch.inf
    weights = torch.rand(pool(x).shape).to("cuda")
    stock, ours = twins(card, pool, lambda model, x: (model(x) * weights).sum(), x)
    assert torch.equal(ours.value, stock.value)
    assert torch.equal(ours.gradients[0], stock.gradients[0])
    assert ours.launches.total() < 50
    assert ours.waits == []


class Head(nn.Module):
    """Of 64 inputs and 4,096 words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 4096, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), target)


def test_a_loss_over_a_vocabulary_is_formed_from_many_rows_at_once(card: Card):
    """1,024 rows of 4,096 words are four turns of what a CPU's cache holds, and one of a card's."""
    target = torch.randint(0, 4096, (1024,)).to("cuda")
    stock, ours = twins(card, Head(), lambda model, x: model(x, target), torch.randn(1024, 64))
    assert ours.launches["_log_softmax"] == 1
    torch.testing.assert_close(ours.gradients, stock.gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_gradient_of_a_head_is_scaled_in_place_unless_its_graph_is_kept(card: Card, keeps: bool):
    """By what the loss is multiplied with: no second tensor as large as the head. A backward that keeps the graph finds
    the same the next time."""
    target = torch.randint(0, 4096, (1024,)).to("cuda")
    head = convert(Head(), recompute=True).to("cuda")
    weight, x = head.linear.weight, torch.randn(1024, 64).to("cuda").requires_grad_()
    loss = head(x, target) * 3.0
    with _Launches() as launches:
        loss.backward(retain_graph=keeps)
    assert (launches.counts["mul_"], launches.counts["mul"]) == ((0, 3) if keeps else (2, 1))
    first = weight.grad.clone()
    torch.testing.assert_close(first, _stock_gradient(head, x, target), rtol=1e-4, atol=1e-7)
    if keeps:
        loss.backward()
        torch.testing.assert_close(weight.grad, 2 * first)


def _stock_gradient(head: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    weight = head.linear.weight.detach().requires_grad_()
    (found,) = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target) * 3.0, weight)
    return found


def test_rms_norm_is_stock_and_still_had_again(card: Card):
    """CUDA's kernel keeps the input and a number a row; the linear layer behind it computes its output from that."""
    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8))
    stock, ours = twins(card, model, lambda model, x: model(x).square().sum(), torch.randn(4, 8))
    norm, linear = convert(copy.deepcopy(model).to("cuda"))
    normed = norm(torch.randn(4, 8).to("cuda").requires_grad_())
    assert normed.grad_fn.name() == F.rms_norm(torch.randn(4, 8, requires_grad=True), [8], norm.weight).grad_fn.name()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear(normed)
    assert all(one.data_ptr() != normed.data_ptr() for one in saved)
    torch.testing.assert_close(ours.gradients, stock.gradients)


@pytest.mark.parametrize(("target", "elements"), [("cpu", 2**19), ("cuda", 2**20)])
def test_a_step_that_is_planned_for_a_card_takes_a_cards_pieces(target: str, elements: int):
    """Its fake tensors are a CPU's."""
    with PlannedMode(target):
        (piece,), *_ = bits.pieces(torch.empty(2**20))
    assert piece.numel() == elements


def test_a_maximum_has_one_tensor_of_indices_at_a_time(card: Card):
    """8 bytes an output while they are packed, as stock keeps to backward; half a byte is kept."""
    x = torch.rand(4, 64, 64, 64).to("cuda").requires_grad_()  # 4 MiB
    pool = convert(nn.MaxPool2d(2).to("cuda"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = pool(x)
    most, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    assert output.nbytes == 2**20
    assert kept == 2**20 + 2**16  # two bits an output
    assert most < (8 + 4 + 2) * output.numel()
