"""Pooling: a maximum's place within its window, in bits; an average needs nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..internals.fake_tensors import device_type
from . import bits
from .convolution import for_each_dim
from .graph import run, turns
from .sites import Site

_STOCK: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MAX_WITH_INDICES: dict[int, Any] = {
    2: torch.ops.aten.max_pool2d_with_indices.default,
    3: torch.ops.aten.max_pool3d_with_indices.default,
}
_MAX_BACKWARD: dict[int, Any] = {
    2: torch.ops.aten.max_pool2d_with_indices_backward.grad_input,
    3: torch.ops.aten.max_pool3d_with_indices_backward.grad_input,
}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By an element's bytes: what compares faster than floats do."""
_MOST_PLACES = 16
"""Places in a window that four bits tell apart."""
_NOWHERE = 255
_ROWS_ELEMENTS = 2**17
_MOST_TURNS = 8
"""On a CPU an input is worked on in turns, of so many elements or more: a few times as many lie in memory."""


@dataclass(frozen=True)
class _Window:
    """A pooling window's numbers, one for each dimension. A place in it is counted as its elements lie in memory."""

    ceil_mode: bool
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @property
    def num_places(self) -> int:
        return math.prod(self.kernel)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As torch's own functions take them."""
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode

    def largest(self, x: Tensor, size_out: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of each window the largest element and the first place where it stands, one dimension after the other.

        Args:
            x: (..., *input).
            size_out: without the dimensions before.

        Returns:
            Of (..., *size_out), the second as uint8.
        """
        pads = self._paddings(x.shape[-len(size_out) :], size_out)
        largest = F.pad(x, pads, value=-math.inf) if any(pads) else x
        place = torch.zeros((), dtype=torch.uint8, device=x.device)
        for dim, length in enumerate(size_out):
            largest, place = self._largest_along(dim, length, largest, place.expand(largest.shape))
        place = place.clamp(max=self.num_places - 1)  # NaN is of other bits than itself
        if any(pads):  # where all is minus infinity
            place = torch.maximum(place, self._first_places(size_out, x.device))
        return largest, place

    def _largest_along(self, dim: int, length: int, x: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        if self.kernel[dim] == 1 and self.stride[dim] == 1:
            return x, place
        step = math.prod(self.kernel[dim + 1 :])
        parts = (self._at(number, dim, length, x) for number in range(self.kernel[dim]))
        places = (self._at(number, dim, length, place) + number * step for number in range(self.kernel[dim]))
        integers = _INTEGERS[x.element_size()]
        largest, first = next(parts) + 0.0, next(places)  # which leaves no -0.0, of other bits than 0.0
        for part, there in zip(parts, places, strict=True):
            part = part + 0.0
            found = torch.maximum(largest, part)
            is_larger, is_smaller = (
                other.view(integers).bitwise_xor_(found.view(integers)).to(torch.bool).view(torch.uint8).mul_(_NOWHERE)
                for other in (largest, part)
            )
            first = torch.minimum(is_larger.bitwise_or_(first), is_smaller.bitwise_or_(there))
            largest = found
        return largest, first

    def _at(self, number: int, dim: int, length: int, x: Tensor) -> Tensor:
        """What stands at a number along a dimension of each window."""
        start, step = number * self.dilation[dim], self.stride[dim]
        along = slice(start, start + (length - 1) * step + 1, step)
        index: tuple[Any, ...] = (..., along, *[slice(None)] * (len(self.kernel) - 1 - dim))
        return x[index]

    def _paddings(self, size: Sequence[int], size_out: Sequence[int]) -> list[int]:
        """As ``F.pad`` takes them: what windows reach beyond an input, the last dimension first."""
        found = []
        for dim in reversed(range(len(self.kernel))):
            reach = (size_out[dim] - 1) * self.stride[dim] + self.dilation[dim] * (self.kernel[dim] - 1) + 1
            found += [self.padding[dim], max(0, reach - size[dim] - self.padding[dim])]
        return found

    def _first_places(self, size_out: Sequence[int], device: torch.device) -> Tensor:
        """For each output the first place in its window that is not padding, as uint8."""
        firsts = []
        for dim, length in enumerate(size_out):
            before = self.padding[dim] - torch.arange(length, device=device) * self.stride[dim]
            steps = before.clamp_(min=0).add_(self.dilation[dim] - 1).div_(self.dilation[dim], rounding_mode="floor")
            firsts.append(steps * math.prod(self.kernel[dim + 1 :]))
        return _outer_sum(firsts).to(torch.uint8)

    def indices(self, place: Tensor, size: Sequence[int]) -> Tensor:
        """Where an input of ``size`` has the element at each output's place, as torch's own pooling counts."""
        within, starts = self._addresses(place.shape[-len(size) :], size, place.device)
        return within.index_select(0, place.flatten().int()).view(place.shape).add_(starts)

    def places(self, indices: Tensor, size: Sequence[int]) -> Tensor:
        """Of :meth:`indices`, which are overwritten, the places: where several have one address, any of them."""
        within, starts = self._addresses(indices.shape[-len(size) :], size, indices.device)
        reach = (dilation * (count - 1) for dilation, count in zip(self.dilation, self.kernel, strict=True))
        most = sum(count * step for count, step in zip(reach, _steps(size), strict=True))
        numbers = torch.zeros(most + 1, dtype=torch.uint8, device=indices.device)
        numbers[within] = torch.arange(len(within), dtype=torch.uint8, device=indices.device)
        return numbers[indices.sub_(starts)]

    def _addresses(self, size_out: Sequence[int], size: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Of the places, from a window's first on; and of each window's first place."""
        steps = _steps(size)
        within = [dilation * step for dilation, step in zip(self.dilation, steps, strict=True)]
        between = [stride * step for stride, step in zip(self.stride, steps, strict=True)]
        start = sum(padding * step for padding, step in zip(self.padding, steps, strict=True))
        return _table(self.kernel, within, device).flatten(), _table(size_out, between, device) - start


def _steps(size: Sequence[int]) -> list[int]:
    """How far apart in memory neighbours are, in each dimension."""
    return [math.prod(size[dim + 1 :]) for dim in range(len(size))]


def _table(counts: Sequence[int], steps: list[int], device: torch.device) -> Tensor:
    """Where each of so many elements in each dimension lies, which are ``steps`` apart. Made on the device: a copy from
    the host would wait for it."""
    pairs = zip(counts, steps, strict=True)
    return _outer_sum([torch.arange(0, count * step, step, device=device) for count, step in pairs])


def _outer_sum(axes: list[Tensor]) -> Tensor:
    return functools.reduce(lambda sums, axis: sums[..., None] + axis, axes)


def _rows(x: Tensor) -> Iterator[slice]:
    if device_type(x) == "cuda":  # which has memory for it, and each turn's kernels to launch
        return iter((slice(0, len(x)),))
    num_rows = max(1, _ROWS_ELEMENTS // max(1, x.shape[1:].numel()), -(-len(x) // _MOST_TURNS))
    return (slice(row, row + num_rows) for row in turns(len(x), num_rows, x))


class _MaxPool(torch.autograd.Function):
    """Where NaN is the largest, its gradient goes elsewhere in the window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: _Window, like: Tensor) -> Tensor:
        num_dims = len(window.kernel)
        if device_type(x) == "cuda":  # one kernel, and its indices as long as it takes to pack them
            output: Tensor
            output, indices = _MAX_WITH_INDICES[num_dims](x, *window.arguments)
            place = window.places(indices, x.shape[-num_dims:])
        else:
            output = torch.empty_like(like, device=x.device)
            place = torch.empty(like.size(), dtype=torch.uint8, device=x.device)
            for rows in _rows(x):
                output[rows], place[rows] = window.largest(x[rows], like.shape[-num_dims:])
        ctx.window, ctx.size = window, x.size()
        ctx.save_for_backward(bits.pack_small(place, window.num_places))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        window, num_dims = ctx.window, len(ctx.window.kernel)
        place = bits.unpack_small(packed, window.num_places, grad.size())
        grad, grad_x = grad.contiguous(), grad.new_empty(ctx.size)
        for rows in _rows(grad_x):
            found = grad_x[rows]
            indices = window.indices(place[rows], ctx.size[-num_dims:])
            _MAX_BACKWARD[num_dims](grad[rows], found, *window.arguments, indices, grad_input=found)
            del indices  # before the next ones are there
        return grad_x, None, None


def max_pool(num_dims: int) -> Callable[..., Any]:
    """``F.max_pool2d`` or ``F.max_pool3d``."""

    def replacement(
        site: Site, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Any:  # fmt: skip
        strides = kernel_size if stride is None or stride == [] else stride
        numbers = (for_each_dim(value, num_dims) for value in (kernel_size, strides, padding, dilation))
        window = _Window(ceil_mode, *numbers)
        arguments = (kernel_size, stride, padding, dilation, ceil_mode)
        can = input.requires_grad and input.is_floating_point() and window.num_places <= _MOST_PLACES
        if return_indices or not can:
            return _STOCK[num_dims](input, *arguments, return_indices)
        return run(_MaxPool, input, window, _STOCK[num_dims](torch.empty_like(input, device="meta"), *arguments))

    return replacement


def max_pool1d(
    site: Site, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """``F.max_pool1d``: in two dimensions, of which one is 1."""
    if return_indices or not input.requires_grad:
        return _STOCK[1](input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    strides = kernel_size if stride is None or stride == [] else stride
    numbers = ((1, kernel_size), (1, strides), (0, padding), (1, dilation))
    wide = [(one, *for_each_dim(value, 1)) for one, value in numbers]
    return max_pool(2)(site, input.unsqueeze(-2), *wide, ceil_mode).squeeze(-2)


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


_ADAPTIVE_BACKWARD = {2: torch.ops.aten._adaptive_avg_pool2d_backward, 3: torch.ops.aten._adaptive_avg_pool3d_backward}
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
