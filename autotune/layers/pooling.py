"""Pooling: a maximum's place within its window, in bits; an average needs nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import bits
from .conv import for_each_dim
from .graph import run
from .sites import Site

__all__ = ["avg_pool2d", "max_pool"]

_STOCK: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


_MOST_PLACES = 16
"""Places in a window that four bits tell apart; each is a pass over the output."""


@dataclass(frozen=True)
class _Window:
    """A pooling window's numbers, one for each dimension."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @property
    def num_places(self) -> int:
        return math.prod(self.kernel)

    def paddings(self, size: torch.Size, size_out: torch.Size) -> list[int]:
        """As ``F.pad`` takes them: what windows reach beyond an input, the last dimension first."""
        found = []
        num_dims = len(self.kernel)
        for dim in reversed(range(num_dims)):
            reach = (size_out[dim - num_dims] - 1) * self.stride[dim] + self.dilation[dim] * (self.kernel[dim] - 1) + 1
            found += [self.padding[dim], max(0, reach - size[dim - num_dims] - self.padding[dim])]
        return found

    def views(self, padded: Tensor, size_out: torch.Size) -> Iterator[Tensor]:
        """For each place in a window, the elements of the padded input that stand there, as large as the output."""
        num_dims = len(self.kernel)
        for place in itertools.product(*map(range, self.kernel)):
            view = padded
            for dim, at in enumerate(place):
                start, step = at * self.dilation[dim], self.stride[dim]
                steps = slice(start, start + (size_out[dim - num_dims] - 1) * step + 1, step)
                index: tuple[Any, ...] = (..., steps, *[slice(None)] * (num_dims - 1 - dim))
                view = view[index]
            yield view


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: _Window, size_out: torch.Size) -> Tensor:
        pads = window.paddings(x.size(), size_out)
        padded = F.pad(x, pads, value=-math.inf) if any(pads) else x
        views = window.views(padded, size_out)
        largest = next(views).clone()
        place = torch.zeros_like(largest, dtype=torch.uint8)
        for number, view in enumerate(views, 1):
            larger = (view <= largest).logical_not_()
            place = torch.maximum(place, larger.view(torch.uint8).mul_(number))  # the last that was larger
            largest = torch.maximum(largest, view)
        ctx.window, ctx.pads, ctx.size, ctx.size_padded = window, pads, x.size(), padded.size()
        ctx.save_for_backward(bits.pack_small(place, window.num_places))
        return largest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        place = bits.unpack_small(packed, ctx.window.num_places, grad.size())
        grad_x = torch.zeros(ctx.size_padded, dtype=grad.dtype, device=grad.device)
        for number, view in enumerate(ctx.window.views(grad_x, grad.size())):
            view += bits.keep(grad, (place == number).view(torch.int8).neg_())
        if any(ctx.pads):
            grad_x = F.pad(grad_x, [-pad for pad in ctx.pads])
        return grad_x, None, None


def max_pool(num_dims: int) -> Callable[..., Any]:
    """``F.max_pool1d``, ``F.max_pool2d`` or ``F.max_pool3d``."""

    def replacement(
        site: Site, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Any:  # fmt: skip
        strides = kernel_size if stride is None or stride == [] else stride
        window = _Window(*(for_each_dim(value, num_dims) for value in (kernel_size, strides, padding, dilation)))
        arguments = (kernel_size, stride, padding, dilation, ceil_mode)
        can = input.requires_grad and input.is_floating_point() and window.num_places <= _MOST_PLACES
        if return_indices or not can:
            return _STOCK[num_dims](input, *arguments, return_indices)
        size_out = _STOCK[num_dims](torch.empty(input.size(), device="meta"), *arguments).size()
        return run(_MaxPool, input, window, size_out)

    return replacement


class _AvgPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        ctx.size, ctx.arguments = x.size(), arguments
        return F.avg_pool2d(x, *arguments)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        like = grad.new_empty(()).expand(ctx.size)  # only its size is read
        return torch.ops.aten.avg_pool2d_backward(grad, like, *ctx.arguments), None


def avg_pool2d(
    site: Site, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """``F.avg_pool2d``."""
    strides = kernel_size if stride is None else stride
    each = [for_each_dim(value, 2) for value in (kernel_size, strides, padding)]
    return run(_AvgPool2d, input, (*each, ceil_mode, count_include_pad, divisor_override))
