"""Pooling: a maximum's place within its window, in bits; an average needs nothing."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import bits
from .conv import for_each_dim
from .graph import run, turns
from .sites import Site

__all__ = ["adaptive_avg_pool", "adaptive_avg_pool1d", "avg_pool", "avg_pool1d", "max_pool"]

_STOCK: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


_MOST_PLACES = 16
"""Places in a window that four bits tell apart; each is a pass over the output."""
_ROWS_ELEMENTS = 2**18
"""Indices of elements that lie in memory at once."""


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

    def first_places(self, size_out: torch.Size, device: torch.device) -> Tensor:
        """For each output the first place in its window that is not padding, as uint8."""
        num_dims = len(self.kernel)
        firsts = []
        for dim in range(num_dims):
            before = self.padding[dim] - torch.arange(size_out[dim - num_dims], device=device) * self.stride[dim]
            steps = before.clamp_(min=0).add_(self.dilation[dim] - 1).div_(self.dilation[dim], rounding_mode="floor")
            firsts.append(steps * math.prod(self.kernel[dim + 1 :]))
        return _outer_sum(firsts).to(torch.uint8)

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

    def scatter(self, grad: Tensor, place: Tensor, grad_x: Tensor) -> None:
        """Add each output's gradient to the element of the padded input that stood at its place, some rows at a time.

        Args:
            grad: (rows, ..., *output), contiguous like the rest.
            place: in the window, of the same shape.
            grad_x: (rows, ..., *padded input).
        """
        num_dims, size = len(self.kernel), grad_x.size()
        steps = [math.prod(size[dim + 1 :]) for dim in range(len(size) - num_dims, len(size))]
        within = [dilation * step for dilation, step in zip(self.dilation, steps, strict=True)]
        places = _addresses(self.kernel, within, grad.device).flatten()
        between = [stride * step for stride, step in zip(self.stride, steps, strict=True)]
        starts = _addresses(grad.shape[-num_dims:], between, grad.device)
        num_rows = max(1, _ROWS_ELEMENTS // max(1, grad.shape[1:].numel()))
        for row in turns(len(grad), num_rows, grad):
            rows = slice(row, row + num_rows)
            index = places.index_select(0, place[rows].flatten().int()).view(place[rows].shape).add_(starts)
            inside = -num_dims, -1
            grad_x[rows].flatten(*inside).scatter_add_(-1, index.flatten(*inside), grad[rows].flatten(*inside))
            del index  # before the next one is there


def _addresses(counts: Sequence[int], steps: list[int], device: torch.device) -> Tensor:
    """Where each of so many elements in each dimension lies, which are ``steps`` apart."""
    return _outer_sum([torch.arange(count, device=device) * step for count, step in zip(counts, steps, strict=True)])


def _outer_sum(axes: list[Tensor]) -> Tensor:
    return functools.reduce(lambda sums, axis: sums[..., None] + axis, axes)


class _MaxPool(torch.autograd.Function):
    """Where NaN is the largest, its gradient goes elsewhere in the window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: _Window, size_out: torch.Size) -> Tensor:
        pads = window.paddings(x.size(), size_out)
        padded = F.pad(x, pads, value=-math.inf) if any(pads) else x
        views = window.views(padded, size_out)
        largest = next(views).clone()
        place = torch.zeros_like(largest, dtype=torch.uint8)
        if any(pads):
            place.add_(window.first_places(size_out, x.device))
        for number, view in enumerate(views, 1):
            larger = view > largest
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
        ctx.window.scatter(grad.contiguous(), place, grad_x)
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


class _Average(torch.autograd.Function):
    """A pooling whose ``backward`` reads of the input only its size."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[..., Tensor], backward: Any, arguments: tuple[Any, ...]
    ) -> Tensor:
        ctx.size, ctx.backward, ctx.arguments = x.size(), backward, arguments
        return forward(x, *arguments)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        like = grad.new_empty(()).expand(ctx.size)
        return ctx.backward(grad, like, *ctx.arguments), None, None, None


_AVERAGE_BACKWARD = {2: torch.ops.aten.avg_pool2d_backward, 3: torch.ops.aten.avg_pool3d_backward}
_AVERAGE: dict[int, Callable[..., Tensor]] = {2: F.avg_pool2d, 3: F.avg_pool3d}


def avg_pool(num_dims: int) -> Callable[..., Tensor]:
    """``F.avg_pool2d`` or ``F.avg_pool3d``."""

    def replacement(
        site: Site, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Tensor:  # fmt: skip
        strides = kernel_size if stride is None or stride == [] else stride
        each = [for_each_dim(value, num_dims) for value in (kernel_size, strides, padding)]
        arguments = (*each, ceil_mode, count_include_pad, divisor_override)
        if not input.requires_grad:
            return _AVERAGE[num_dims](input, *arguments)
        return run(_Average, input, _AVERAGE[num_dims], _AVERAGE_BACKWARD[num_dims], arguments)

    return replacement


def avg_pool1d(
    site: Site, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:  # fmt: skip
    """``F.avg_pool1d``: in two dimensions, of which one is 1."""
    strides = kernel_size if stride is None or stride == () else stride
    wide = [(one, *for_each_dim(value, 1)) for one, value in ((1, kernel_size), (1, strides), (0, padding))]
    return avg_pool(2)(site, input.unsqueeze(-2), *wide, ceil_mode, count_include_pad).squeeze(-2)


_ADAPTIVE_BACKWARD = {
    2: torch.ops.aten._adaptive_avg_pool2d_backward,
    3: torch.ops.aten._adaptive_avg_pool3d_backward,
}
_ADAPTIVE: dict[int, Callable[..., Tensor]] = {2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def adaptive_avg_pool(num_dims: int) -> Callable[..., Tensor]:
    """``F.adaptive_avg_pool2d`` or ``F.adaptive_avg_pool3d``."""

    def replacement(site: Site, input: Tensor, output_size: Any) -> Tensor:
        stock = _ADAPTIVE[num_dims]
        is_mean = output_size in (1, (1,) * num_dims, [1] * num_dims)  # which keeps nothing
        if is_mean or not input.requires_grad:
            return stock(input, output_size)
        backward = _ADAPTIVE_BACKWARD[num_dims]
        return run(_Average, input, lambda x: stock(x, output_size), backward, ())

    return replacement


def adaptive_avg_pool1d(site: Site, input: Tensor, output_size: Any) -> Tensor:
    """``F.adaptive_avg_pool1d``: in two dimensions, of which one is 1."""
    return adaptive_avg_pool(2)(site, input.unsqueeze(-2), (1, *for_each_dim(output_size, 1))).squeeze(-2)
