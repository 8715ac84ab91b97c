"""Convolutions: the input is kept only for the weight's gradient, and not saved if it can be rematerialized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rematerialization
from .graph import autocast_dtype, run
from .sites import Site

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def for_each_dim(value: Any, num_dims: int) -> list[int]:
    """One number for each dimension, as torch reads 3, (3,) and (3, 3)."""
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * num_dims if len(values) == 1 else values


@dataclass(frozen=True)
class _Geometry:
    """A convolution's numbers, one for each dimension."""

    transposed: bool
    stride: list[int]
    padding: list[int]
    output_padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def num_dims(self) -> int:
        return len(self.stride)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.transposed:
            rest = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
            return _CONV_TRANSPOSE[self.num_dims](x, weight, bias, *rest)
        return _CONV[self.num_dims](x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
        """The gradients of input, weight and bias that are ``wanted``."""
        num_channels = weight.shape[1] * self.groups if self.transposed else weight.shape[0]
        rest = (self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups)
        found = torch.ops.aten.convolution_backward(grad, x, weight, [num_channels], *rest, wanted)
        return tuple(gradient if want else None for gradient, want in zip(found, wanted, strict=True))

    def backward_input(self, grad: Tensor, weight: Tensor, size: torch.Size) -> Tensor:
        """The input's gradient alone: a convolution of the other kind, which reads no input."""
        if self.transposed:
            found = _CONV[self.num_dims](grad, weight, None, self.stride, self.padding, self.dilation, self.groups)
            for dim, length in enumerate(size[2:], 2):  # padding of the output may add windows
                found = found.narrow(dim, 0, length)
            return found
        missing = [self._missing(size[2 + i], weight.shape[2 + i], grad.shape[2 + i], i) for i in range(self.num_dims)]
        rest = (self.stride, self.padding, missing, self.groups, self.dilation)
        return _CONV_TRANSPOSE[self.num_dims](grad, weight, None, *rest)

    def _missing(self, size: int, kernel: int, size_out: int, dim: int) -> int:
        """Places at the input's end that no window reached: a stride's remainder."""
        reached = (size_out - 1) * self.stride[dim] + self.dilation[dim] * (kernel - 1) + 1
        return size + 2 * self.padding[dim] - reached


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry, held: Any) -> Tensor:
        ctx.remat, kept = held
        ctx.dtype, ctx.geometry, ctx.size = autocast_dtype(x) or x.dtype, geometry, x.size()
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x = x.to(ctx.dtype)
        if ctx.remat is None and weight.requires_grad:
            kept = (x,)
        ctx.save_for_backward(weight, *kept)
        return geometry.forward(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        weight = weight.to(ctx.dtype)
        if wants_weight:
            x = kept[0] if ctx.remat is None else ctx.remat.build(kept).to(ctx.dtype)
            found = ctx.geometry.backward(grad, x, weight, [wants_x, True, wants_bias])
        else:
            grad_x = ctx.geometry.backward_input(grad, weight, ctx.size) if wants_x else None
            found = grad_x, None, grad.sum([0, *range(2, grad.dim())]) if wants_bias else None
        pairs = zip(found, ctx.dtypes, strict=True)
        return *(None if gradient is None else gradient.to(dtype) for gradient, dtype in pairs), None, None


def _held(x: Tensor, weight: Tensor, num_dims: int) -> Any:
    """What is saved in place of ``x``, by ``rematerialization.hold``; None if torch's own convolution does as well."""
    trains = weight.requires_grad
    if x.is_complex() or x.dim() != num_dims + 2 or not (x.requires_grad or trains):
        return None
    held = rematerialization.hold(x) if trains else (None, ())
    dtype = autocast_dtype(x)
    if trains and held[0] is None and dtype in (None, x.dtype):
        rematerialization.note_kept(x)
        if dtype is None:
            return None
    return held


def conv(num_dims: int) -> Callable[..., Tensor]:
    """``F.conv1d``, ``F.conv2d`` or ``F.conv3d``."""

    def replacement(
        site: Site, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        is_uneven = isinstance(padding, str) and any(total % 2 for total in _whole(padding, weight, dilation))
        held = None if is_uneven else _held(input, weight, num_dims)
        if held is None:
            return _CONV[num_dims](input, weight, bias, stride, padding, dilation, groups)
        if isinstance(padding, str):
            padding = [total // 2 for total in _whole(padding, weight, dilation)]
        strides, paddings, dilations = (for_each_dim(value, num_dims) for value in (stride, padding, dilation))
        geometry = _Geometry(False, strides, paddings, [0] * num_dims, dilations, groups)
        return run(_Conv, input, weight, bias, geometry, held)

    return replacement


def _whole(padding: str, weight: Tensor, dilation: Any) -> list[int]:
    """What ``padding`` by name adds to each dimension, both ends together."""
    kernels = weight.shape[2:]
    dilations = for_each_dim(dilation, len(kernels))
    return [one * (kernel - 1) * (padding == "same") for one, kernel in zip(dilations, kernels, strict=True)]


def conv_transpose(num_dims: int) -> Callable[..., Tensor]:
    """``F.conv_transpose1d``, ``F.conv_transpose2d`` or ``F.conv_transpose3d``."""

    def replacement(
        site: Site, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
    ) -> Tensor:  # fmt: skip
        held = _held(input, weight, num_dims)
        if held is None:
            return _CONV_TRANSPOSE[num_dims](input, weight, bias, stride, padding, output_padding, groups, dilation)
        strides, paddings, rests, dilations = (
            for_each_dim(value, num_dims) for value in (stride, padding, output_padding, dilation)
        )
        geometry = _Geometry(True, strides, paddings, rests, dilations, groups)
        return run(_Conv, input, weight, bias, geometry, held)

    return replacement
