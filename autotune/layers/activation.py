"""Activations: a bit an element where backward reads no more; else their input, from which the output is had again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import bits, recipes
from .graph import run
from .sites import Site

__all__ = ["hardtanh", "keep_input", "leaky_relu", "relu", "relu6"]

Activation = Callable[..., Tensor]


class _Gated(torch.autograd.Function):
    """An activation whose derivative is ``slope`` where it ``blocks`` and 1 elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Activation, blocks: Activation, slope: float, inplace: bool) -> Tensor:
        passed = blocks(x).logical_not_()
        ctx.layout, ctx.slope = (passed.size(), passed.stride()), slope
        ctx.save_for_backward(bits.pack(passed))
        if inplace:
            ctx.mark_dirty(x)
        return function(x, inplace=inplace)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        passed = bits.unpack(packed, *ctx.layout)
        kept = bits.keep(grad, passed)
        if ctx.slope != 0.0:
            kept += bits.keep(grad * ctx.slope, passed.bitwise_not_())
        return kept, None, None, None, None


def _gate(site: Site, x: Tensor, function: Activation, blocks: Activation, slope: float, inplace: bool) -> Tensor:
    recipe = recipes.find(x)
    if recipe is None and site.output_is_kept():
        return function(x, inplace=inplace)
    output = run(_Gated, x, function, blocks, slope, inplace)
    return output if recipe is None else recipes.publish(output, function, recipe)


def relu(site: Site, input: Tensor, inplace: bool = False) -> Tensor:
    """``F.relu``."""
    return _gate(site, input, F.relu, lambda x: x <= 0, 0.0, inplace)


def leaky_relu(site: Site, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """``F.leaky_relu``."""

    def function(x: Tensor, inplace: bool = False) -> Tensor:
        return F.leaky_relu(x, negative_slope, inplace)

    return _gate(site, input, function, lambda x: x <= 0, negative_slope, inplace)


def hardtanh(site: Site, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """``F.hardtanh``."""

    def function(x: Tensor, inplace: bool = False) -> Tensor:
        return F.hardtanh(x, min_val, max_val, inplace)

    return _gate(site, input, function, lambda x: (x <= min_val) | (x >= max_val), 0.0, inplace)


def relu6(site: Site, input: Tensor, inplace: bool = False) -> Tensor:
    """``F.relu6``."""
    return hardtanh(site, input, 0.0, 6.0, inplace)


def keep_input(function: Activation) -> Activation:
    """For an activation whose backward needs its input in any case (GELU, SiLU): stock, with a recipe."""

    def replacement(site: Site, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = function(input, *args, **kwargs)
        if output is input:  # in place: the input is gone
            return output
        return recipes.publish(output, lambda x: function(x, *args, **kwargs), input)

    return replacement
