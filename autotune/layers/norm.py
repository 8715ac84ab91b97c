"""Normalisations: their output is rematerialized from their input; with frozen statistics neither is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..internals.fake_tensors import device_type
from . import rematerialization
from .graph import run, saved_tensors_hooks
from .sites import Site


class _FrozenBatchNorm(torch.autograd.Function):
    """Statistics and weight are constants: the gradient is scaled for each channel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.save_for_backward(var, weight)
        ctx.eps, ctx.bias_dtype = eps, None if bias is None else bias.dtype
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        var, weight = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            scale = torch.rsqrt(var + ctx.eps) if weight is None else torch.rsqrt(var + ctx.eps) * weight
            grad_x = grad * scale.to(grad.dtype).view([1, -1] + [1] * (grad.dim() - 2))
        if ctx.needs_input_grad[4]:
            grad_bias = grad.sum([0, *range(2, grad.dim())], dtype=_wide(grad)).to(ctx.bias_dtype)
        return grad_x, None, None, None, grad_bias, None


def batch_norm(
    site: Site, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """``F.batch_norm``."""
    trains = weight is not None and weight.requires_grad
    has_statistics = running_mean is not None and running_var is not None
    if not training and not trains and has_statistics and input.requires_grad:
        return run(_FrozenBatchNorm, input, running_mean, running_var, weight, bias, eps)
    output = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training or not site.recomputes:
        return output

    statistics = _statistics(output)

    def again(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if statistics is None:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
        mean, invstd = statistics
        return F.batch_norm(x, mean, invstd.reciprocal().square_().sub_(eps), weight, bias, False, 0.0, eps)

    return rematerialization.publish(output, again, input, weight, bias)


def _statistics(output: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and 1 / sqrt(variance + eps) of each channel, which a BatchNorm's node keeps anyway; None where hooks may
    have changed them."""
    node: Any = output.grad_fn
    if saved_tensors_hooks() is not None or not hasattr(node, "_saved_result2"):
        return None
    return node._saved_result1, node._saved_result2


def instance_norm(
    site: Site, input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """``F.instance_norm``."""
    output = F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats:
        return output

    def again(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.instance_norm(x, None, None, weight, bias, True, 0.0, eps)

    return rematerialization.publish(output, again, input, weight, bias)


def keep_input(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``F.layer_norm`` and ``F.group_norm``: stock, and their output can be rematerialized."""

    def replacement(
        site: Site, input: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        output = function(input, shape, weight, bias, eps)
        dtype = output.dtype  # autocast may have computed in another than the input's

        def again(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return function(x.to(dtype), shape, weight, bias, eps)

        return rematerialization.publish(output, again, input, weight, bias)

    return replacement


class _RMSNorm(torch.autograd.Function):
    """y = x * r * weight with r = 1 / sqrt(mean(x²) + eps); keeps x and r. Source: arXiv:1910.07467."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float) -> Tensor:
        ctx.dims = list(range(-len(shape), 0))
        scale = torch.rsqrt(x.to(_wide(x)).square().mean(ctx.dims, keepdim=True) + eps)
        ctx.save_for_backward(x, scale, weight)
        return F.rms_norm(x, shape, weight, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        normed, grad = x * scale, grad.to(scale.dtype)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = (grad * normed).sum_to_size(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            scaled = grad if weight is None else grad * weight
            along = (scaled * normed).mean(ctx.dims, keepdim=True)
            grad_x = ((scaled - normed * along) * scale).to(x.dtype)
        return grad_x, None, grad_weight, None


def rms_norm(
    site: Site, input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """``F.rms_norm``."""
    if not input.requires_grad or (weight is not None and weight.dtype != input.dtype):
        return F.rms_norm(input, normalized_shape, weight, eps)
    known = torch.finfo(_wide(input)).eps if eps is None else eps
    # CUDA's own is one kernel forward and one back, and keeps no more (torch 2.13, native_functions.yaml,
    # _fused_rms_norm). A CPU's is a handful of operations, which keep x several times over.
    has_kernel = device_type(input) == "cuda"
    shape = list(normalized_shape)
    output = F.rms_norm(input, shape, weight, known) if has_kernel else run(_RMSNorm, input, shape, weight, known)
    dtype = output.dtype  # autocast may have computed in another than the input's
    return rematerialization.publish(
        output, lambda x, weight: F.rms_norm(x.to(dtype), shape, weight, known), input, weight
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
