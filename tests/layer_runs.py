"""Stock layers and converted ones, run side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from kept_bytes import kept_bytes
from torch import Tensor, nn

from autotune.layers import convert

IMAGES = (4, 8, 16, 16)
TOKENS = (4, 8, 32)
VOLUME = (2, 4, 4, 8, 8)


class Ran:
    """One forward and backward."""

    def __init__(self, output: Tensor, kept: int, gradients: list[Tensor | None]) -> None:
        self.output, self.kept, self.gradients = output, kept, gradients


def twins(
    build: Callable[[], nn.Module], trains: bool = True, example: object = None, **options: bool
) -> tuple[nn.Module, nn.Module]:
    """A model, and its converted copy; to recompute unless told otherwise."""
    torch.manual_seed(0)
    stock = build().requires_grad_(trains)
    return stock, convert(copy.deepcopy(stock), example, **options or {"recompute": True})


def run(model: nn.Module, x: Tensor, **context: object) -> Ran:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    torch.manual_seed(1)
    with torch.autocast("cpu", **context) if context else torch.autocast("cpu", enabled=False):
        kept, output = kept_bytes(lambda: model(x * 1.0), model)  # not a leaf: layers may work in place
    torch.manual_seed(2)
    output.backward(torch.randn_like(output))
    return Ran(output.detach(), kept, [x.grad, *(p.grad for p in model.parameters())])


def assert_same(found: Ran, wanted: Ran, tolerance: float = 1e-5) -> None:
    assert torch.equal(found.output, wanted.output)
    scale = max(float(gradient.abs().max()) for gradient in wanted.gradients if gradient is not None)
    for ours, stock in zip(found.gradients, wanted.gradients, strict=True):
        assert (ours is None) == (stock is None)
        if ours is not None and stock is not None:
            assert ours.dtype == stock.dtype
            assert float((ours - stock).abs().max()) <= tolerance * scale
