"""Pooling: a maximum's place within its window, in bits; an average needs nothing."""

from __future__ import annotations

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

_WITH_INDICES: dict[int, Callable[..., Any]] = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
_STOCK: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


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

    def starts(self, size: torch.Size, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Dimension by dimension, the last first: its number, and where each of an output's windows begins along it."""
        num_dims = len(self.kernel)
        for dim in reversed(range(num_dims)):
            start = torch.arange(size[dim - num_dims], device=device) * self.stride[dim] - self.padding[dim]
            yield dim, start.view([-1] + [1] * (num_dims - 1 - dim))


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: _Window, ceil_mode: bool) -> Tensor:
        num_dims = len(window.kernel)
        output: Tensor
        output, indices = _WITH_INDICES[num_dims](
            x, window.kernel, window.stride, window.padding, window.dilation, ceil_mode
        )
        ctx.window, ctx.x_size, ctx.size = window, x.size(), output.size()
        place, scale = torch.zeros_like(indices), 1
        for dim, start in window.starts(output.size(), x.device):
            at = indices % x.shape[dim - num_dims]
            indices = torch.div(indices, x.shape[dim - num_dims], rounding_mode="floor")
            place += torch.div(at - start, window.dilation[dim], rounding_mode="floor") * scale
            scale *= window.kernel[dim]
        ctx.save_for_backward(bits.pack_small(place.to(torch.uint8), window.num_places))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        window, num_dims = ctx.window, len(ctx.window.kernel)
        place = bits.unpack_small(packed, window.num_places, ctx.size).to(torch.int64)
        index, scale = torch.zeros_like(place), 1
        for dim, start in window.starts(ctx.size, grad.device):
            index += (start + place % window.kernel[dim] * window.dilation[dim]) * scale
            place = torch.div(place, window.kernel[dim], rounding_mode="floor")
            scale *= ctx.x_size[dim - num_dims]
        grad_x = grad.new_zeros([*ctx.x_size[:-num_dims], scale])
        grad_x.scatter_add_(-1, index.flatten(-num_dims), grad.flatten(-num_dims))
        return grad_x.view(ctx.x_size), None, None


def max_pool(num_dims: int) -> Callable[..., Any]:
    """``F.max_pool1d``, ``F.max_pool2d`` or ``F.max_pool3d``."""

    def replacement(
        site: Site, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Any:  # fmt: skip
        strides = kernel_size if stride is None or stride == [] else stride
        window = _Window(*(for_each_dim(value, num_dims) for value in (kernel_size, strides, padding, dilation)))
        if return_indices or window.num_places > 256 or not input.requires_grad:
            return _STOCK[num_dims](input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        return run(_MaxPool, input, window, ceil_mode)

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
