"""Attention that torch computes in pieces: with dropout on a CPU it keeps four tensors of length times length a head.

Here queries, keys and values are kept, which is what a fused kernel keeps too, and a bit for each weight that dropout
left; the rest is computed again in backward by torch's own function, a few samples at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.weak import TensorWeakRef

from . import bits, rematerialization
from .graph import autocast_dtype, run, turns
from .sites import Site

_STOCK: Any = F.scaled_dot_product_attention
_CHOICE: Any = torch._fused_sdp_choice
_MATH: Any = torch._scaled_dot_product_attention_math
"""Annotated for fewer arguments than they take."""
_TOGETHER = 2**18
"""Weights, or elements of what goes in and comes out, that are computed again together where a sample has fewer."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor:
        p, causal, scale, gqa = options
        output: Tensor
        added = _added(mask, query.dtype)
        output, weights = _MATH(query, key, value, added, p, causal, scale=scale, enable_gqa=gqa)
        num_weights = weights[0].numel()
        num_elements = sum(x.numel() for x in (query, key, value, output)) // len(output)
        ctx.together = max(1, _TOGETHER // max(1, num_weights, num_elements)) if num_weights % 8 == 0 else 1
        packed = None
        if p > 0.0:
            packed = weights.new_empty(len(weights), -(-num_weights // 8), dtype=torch.uint8)
            for samples in _turns(weights, ctx.together):
                flags = bits.pack(bits.is_nonzero, weights[samples].contiguous())
                packed[samples] = flags.view(-1, packed.shape[1])
        ctx.save_for_backward(query, key, value, mask, packed)
        ctx.options, ctx.shape = options, weights.shape[1:]
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, packed = ctx.saved_tensors
        grads = [torch.zeros_like(x) if wants else None for x, wants in zip(inputs, ctx.needs_input_grad, strict=False)]
        for samples in _turns(grad, ctx.together):
            parts = [None if x is None else _part(x, samples, grad.dim()).detach() for x in inputs]
            wanted = [
                part.requires_grad_()
                for part, total in zip(parts, grads, strict=True)
                if part is not None and total is not None
            ]
            with torch.enable_grad():
                output = _again(ctx, parts, None if packed is None else packed[samples])
            found = list(torch.autograd.grad(output, wanted, grad[samples]))
            del output, parts, wanted  # before the next turn makes its own
            for total in grads:
                if total is not None:
                    _part(total, samples, grad.dim()).add_(found.pop(0))
        return *grads, None


def _turns(x: Tensor, together: int) -> Iterator[slice]:
    """Samples that are computed together. Each sample's flags are whole bytes, or it is computed alone: no allocation
    may depend on the batch."""
    return (slice(start, start + together) for start in turns(len(x), together, x))


def _part(x: Tensor, samples: slice, num_dims: int) -> Tensor:
    """Some samples' part of ``x``, or all of it where samples share it."""
    return x if x.dim() < num_dims or len(x) == 1 else x[samples]


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added to the scores: of a boolean one 0 where it holds."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _again(ctx: Any, parts: list[Any], packed: Tensor | None) -> Tensor:
    p, causal, scale, gqa = ctx.options
    passed = None
    if packed is not None:
        passed = torch.empty((len(packed), *ctx.shape), dtype=torch.bool, device=packed.device)
        for flags, part in bits.unpack(packed.view(-1), passed):
            part.copy_(flags)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dropout mask should only be used for testing")
        query, key, value, mask = parts
        added = _added(mask, query.dtype)
        output, _ = _MATH(query, key, value, added, p, causal, dropout_mask=passed, scale=scale, enable_gqa=gqa)
    result: Tensor = output
    return result


def scaled_dot_product_attention(
    site: Site, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``F.scaled_dot_product_attention``, where torch has no fused kernel for it."""
    casts = autocast_dtype(query) is not None
    dtype = autocast_dtype(query) or query.dtype
    with torch.autocast(query.device.type, enabled=False):
        parts: list[Any] = [
            x.to(dtype) if casts and x is not None and x.is_floating_point() else x
            for x in (query, key, value, attn_mask)
        ]
        how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        choice = _CHOICE(*parts, dropout_p, is_causal, **how)
        trains = query.requires_grad and key.requires_grad and value.requires_grad and query.numel() > 0
        is_batched = query.dim() >= 3 + enable_gqa and value.dim() <= max(query.dim(), key.dim())
        is_batched = is_batched and len(value) <= max(len(query), len(key))
        if choice != SDPBackend.MATH.value or not is_batched or not 0.0 <= dropout_p < 1.0 or not trains:
            stock: Tensor = _STOCK(*parts, dropout_p, is_causal, **how)
            return stock
        return run(_Attention, *parts, (dropout_p, is_causal, scale, enable_gqa))


class _Softmax(torch.autograd.Function):
    """Keeps its output as stock does, by a tensor that others may note."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        output = torch.softmax(x, dim, dtype)
        kept = output.detach()
        ctx.save_for_backward(kept)
        ctx.kept, ctx.dim, ctx.dtype = TensorWeakRef(kept), dim, x.dtype
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (output,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad, output, ctx.dim, output.dtype).to(ctx.dtype), None, None


def softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.softmax`` or ``F.softmax``."""

    def replacement(site: Site, input: Tensor, dim: int | None = None, *rest: Any, **options: Any) -> Tensor:
        if not isinstance(dim, int) or not input.requires_grad or rest:
            return function(input, dim, *rest, **options)
        output = run(_Softmax, input, dim, options.get("dtype"))
        node: Any = output.grad_fn
        return rematerialization.note_kept(output, node.kept())

    return replacement
