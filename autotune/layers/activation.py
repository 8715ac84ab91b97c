"""Activations: a bit an element where backward reads no more; else their input, from which the output is had again.

Where rounding is allowed, a byte an element holds the derivative of GELU and SiLU instead of their input.
Source: Novikov et al. 2022, arXiv:2202.00441.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import bits, rematerialization
from .graph import run
from .sites import Site

Activation = Callable[..., Tensor]

_ZERO = 26
"""The byte of a derivative of 0. The least of GELU's and SiLU's is -0.129, the largest 1.129."""
_ONE = 201
"""Steps from a derivative of 0 to one of 1: both are exact, and a byte reaches beyond by 0.13 on either side."""


class _Gated(torch.autograd.Function):
    """An activation whose ``backward`` reads only where it ``passes`` a gradient, which a test of its output tells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, into: Activation, passes: Activation, backward: Any) -> Tensor:
        source = bits.dense(x)
        output = source if inplace else torch.empty_like(source)
        # A piece's bits are taken while it is in the cache still.
        packed = bits.pack(lambda part, result: passes(into(part, out=result)), source, output)
        ctx.save_for_backward(packed)
        ctx.stride, ctx.backward = output.stride(), backward
        if not inplace:
            return output
        ctx.mark_dirty(x)
        return x if source is x else x.copy_(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        grad = bits.dense(grad, ctx.stride)
        grad_x = torch.empty_like(grad)
        for passed, part, result in bits.unpack(packed, grad, grad_x):
            ctx.backward(part, result.copy_(passed), grad_input=result)
        return grad_x, None, None, None, None


def _gate(
    site: Site, x: Tensor, inplace: bool, function: Activation, into: Activation, passes: Activation,
    slope: float | None = None,
) -> Tensor:  # fmt: skip
    """``function``, which ``into`` writes to ``out``.

    ``slope``: where it passes not all, how much it passes; None where backward goes by the output, as ReLU's.
    """
    remat = rematerialization.find(x)
    is_kept = site.output.keep() or (slope is not None and site.input.keep())
    if not x.requires_grad or site.output.always or (remat is None and is_kept):
        return function(x, inplace=inplace)

    def backward(grad: Tensor, passed: Tensor, grad_input: Tensor) -> None:
        if not slope:
            torch.ops.aten.threshold_backward.grad_input(grad, passed, 0.0, grad_input=grad_input)
        else:
            torch.ops.aten.leaky_relu_backward.grad_input(grad, passed, slope, False, grad_input=grad_input)

    output = run(_Gated, x, inplace, into, passes, backward)
    if remat is None:
        return output
    return rematerialization.publish(output, function, remat, overwriting=lambda x: function(x, inplace=True))


def relu(site: Site, input: Tensor, inplace: bool = False) -> Tensor:
    """``F.relu``."""
    return _gate(site, input, inplace, F.relu, lambda x, out: torch.clamp_min(x, 0, out=out), bits.is_nonzero)


def leaky_relu(site: Site, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """``F.leaky_relu``."""

    def function(x: Tensor, inplace: bool = False) -> Tensor:
        return F.leaky_relu(x, negative_slope, inplace)

    def into(x: Tensor, out: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.leaky_relu.out(x, negative_slope, out=out)
        return result

    if negative_slope < 0:  # the output's sign tells nothing
        return function(input, inplace)
    return _gate(site, input, inplace, function, into, lambda y: y > 0, negative_slope)


def hardtanh(site: Site, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """``F.hardtanh``."""

    def function(x: Tensor, inplace: bool = False) -> Tensor:
        return F.hardtanh(x, min_val, max_val, inplace)

    def into(x: Tensor, out: Tensor) -> Tensor:
        return torch.clamp(x, min_val, max_val, out=out)

    def passes(y: Tensor) -> Tensor:
        return ((y <= min_val) | (y >= max_val)).logical_not_()

    return _gate(site, input, inplace, function, into, passes, 0.0)


def relu6(site: Site, input: Tensor, inplace: bool = False) -> Tensor:
    """``F.relu6``."""
    return hardtanh(site, input, 0.0, 6.0, inplace)


def keep_input(function: Activation) -> Activation:
    """For an activation whose backward needs its input anyway (GELU, SiLU): stock, and its output is rematerialized."""

    def replacement(site: Site, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _keep_input(input, lambda x: function(x, *args, **kwargs))

    return replacement


def gelu(site: Site, input: Tensor, approximate: str = "none") -> Tensor:
    """``F.gelu``."""

    def function(x: Tensor, inplace: bool = False) -> Tensor:
        return F.gelu(x, approximate=approximate)

    def derivative(x: Tensor) -> Tensor:
        slope: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)
        return slope

    if _rounds(site, input):
        return run(_Rounded, input, function, derivative, False)
    return _keep_input(input, function)


def silu(site: Site, input: Tensor, inplace: bool = False) -> Tensor:
    """``F.silu``."""
    if _rounds(site, input):
        return run(_Rounded, input, F.silu, _silu_derivative, inplace)
    return _keep_input(input, lambda x: F.silu(x, inplace))


def _silu_derivative(x: Tensor) -> Tensor:
    slope: Tensor = torch.ops.aten.silu_backward(torch.ones_like(x), x)
    return slope


def _rounds(site: Site, x: Tensor) -> bool:
    """Whether a byte an element pays: where the output is kept, the input alone gives both; or others keep that too."""
    is_kept = site.output.keep() or site.input.keep()
    return site.rounds and x.requires_grad and x.is_floating_point() and not is_kept


def _keep_input(x: Tensor, function: Activation) -> Tensor:
    output = function(x)
    if output is x:  # in place: the input is gone
        return output
    return rematerialization.publish(output, function, x)


class _Rounded(torch.autograd.Function):
    """An activation that keeps its derivative in a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Activation, derivative: Activation, inplace: bool) -> Tensor:
        source = bits.dense(x)
        codes = torch.empty_like(source, dtype=torch.uint8)
        for part, code in bits.pieces(source, codes):
            code.copy_(derivative(part).mul_(_ONE).add_(_ZERO).round_())
        ctx.save_for_backward(codes)
        if inplace:
            ctx.mark_dirty(x)
        return function(x, inplace=inplace)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (codes,) = ctx.saved_tensors
        grad = bits.dense(grad, codes.stride())
        grad_x = torch.empty_like(grad)
        for code, part, result in bits.pieces(codes, grad, grad_x):
            torch.mul(code.to(grad.dtype).sub_(_ZERO).div_(_ONE), part, out=result)
        return grad_x, None, None, None
