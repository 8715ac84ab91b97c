"""``Float8Linear``: a linear layer that multiplies numbers of 8 bits in training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .int8_linear import linear_layers

_OF_VALUES, _OF_GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16
"""cuBLAS multiplies rows and columns of so many numbers, or of times as many (torch,
aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
_FEW_INPUTS, _FEW_OUTPUTS = 4096, 1024
"""Of layers with no more of either, casts take longer than products save (torchao 0.18, for H100)."""
_LEAST = 2.0**-100
"""The largest value of a tensor counts as no less, so that the scale of zeros is a number."""


class Float8Linear(nn.Linear):
    """A linear layer whose products, forward and backward, are of float8 numbers within autocast, and stock without.

    Inputs and weights are in e4m3, gradients in e5m2. A scale for a whole tensor brings its largest value near the
    type's; it is a power of two, by which nothing is rounded. Of its input it keeps the 8 bits, and none where the
    weight does not train. Weights are rounded anew in each forward and backward.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; torchao's tensorwise scaling,
    https://github.com/pytorch/ao/tree/main/torchao/float8
    """

    def forward(self, input: Tensor) -> Tensor:
        """
        Args:
            input: (…, in_features).

        Returns:
            (…, out_features), within autocast in its type.
        """
        device = input.device.type
        if not torch.is_autocast_enabled(device) or input.dtype is torch.float64 or input.numel() == 0:
            return super().forward(input)
        rows, dtype = input.reshape(-1, self.in_features), torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):  # each type is said; a CPU's kernel would multiply in another
            outputs: Tensor = _Products.apply(rows, self.weight, self.bias, dtype)  # type: ignore[no-untyped-call]
        return outputs.view(*input.shape[:-1], self.out_features)


class _Products(torch.autograd.Function):
    """What a linear layer multiplies."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        inputs, input_scale = _rounded(input, _OF_VALUES)
        weights, weight_scale = _rounded(weight, _OF_VALUES)
        kept = (inputs, input_scale) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, weight, weight_scale)
        ctx.input_dtype, ctx.bias_dtype = input.dtype, None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(dtype)
        return _product(inputs, input_scale, weights.t(), weight_scale, dtype, bias, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, input_scale, weight, weight_scale = ctx.saved_tensors
        grads, grad_scale = _rounded(grad, _OF_GRADIENTS)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            columns = _by_columns(_cast(weight, weight_scale, _OF_VALUES))
            grad_input = _product(grads, grad_scale, columns, weight_scale, ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            rows = _by_columns(_padded(grads)).t()
            grad_weight = _product(rows, grad_scale, _by_columns(_padded(inputs)), input_scale, weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None


def _rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In float8, row by row in memory, and the scale that it was multiplied by. What is infinite or no number makes
    all that is computed of it no number."""
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32).clamp_min(_LEAST)
    scale = (torch.finfo(dtype).max / largest).log2().floor().exp2()
    return _cast(x, scale, dtype), scale


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale).to(dtype).contiguous()


def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None,
    use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Of (m, k), row by row in memory, and (k, n), column by column: (m, n). Gradients are summed up in fp32 alone."""
    scales = {"scale_a": a_scale.reciprocal(), "scale_b": b_scale.reciprocal()}
    return torch._scaled_mm(a, b, **scales, bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum)


def _padded(x: Tensor) -> Tensor:
    """With rows of zeros up to a multiple of 16."""
    missing = -x.shape[0] % _MULTIPLE
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _by_columns(x: Tensor) -> Tensor:
    """Column by column in memory."""
    return x.t().contiguous().t()


def layers_for_float8(blocks: Iterable[nn.Module]) -> Iterator[nn.Linear]:
    """Stock linear layers within a model's blocks that are large enough, and of sizes that float8 can be multiplied in.
    The head and embeddings are no part of a block."""
    for block in blocks:
        for _, _, linear in linear_layers(block):
            sizes = (linear.in_features, linear.out_features)
            is_small = sizes[0] <= _FEW_INPUTS and sizes[1] <= _FEW_OUTPUTS
            if not is_small and all(size % _MULTIPLE == 0 for size in sizes):
                yield linear


def to_float8(blocks: Iterable[nn.Module]) -> int:
    """Have a model's layers multiply float8 numbers; returns how many do. They stay the modules that they are, with
    another class."""
    found = {*layers_for_float8(blocks)}
    for linear in found:
        linear.__class__ = Float8Linear
    return len(found)


def restore(model: nn.Module) -> None:
    """Stock layers again."""
    for module in model.modules():
        if type(module) is Float8Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
