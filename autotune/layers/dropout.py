"""Dropout: one bit for each element."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from . import bits, rematerialization
from .graph import run
from .sites import Site


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, inplace: bool) -> Tensor:
        output, mask = torch.native_dropout(x, p, True)
        mask = bits.dense(mask)
        packed = bits.pack(lambda flags: flags, mask)
        ctx.save_for_backward(packed)
        ctx.packed, ctx.stride, ctx.p = TensorWeakRef(packed), mask.stride(), p
        if not inplace:
            return output
        ctx.mark_dirty(x)
        return x.copy_(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return _drop(grad, packed, ctx.stride, ctx.p), None, None


def _drop(x: Tensor, packed: Tensor, stride: tuple[int, ...], p: float) -> Tensor:
    x = bits.dense(x, stride)
    output = torch.empty_like(x)
    for passed, part, result in bits.unpack(packed, x, output):
        torch.mul(part, passed.to(torch.bool).to(x.dtype).mul_(1.0 / (1.0 - p)), out=result)
    return output


def dropout(site: Site, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``F.dropout``, from the same random numbers."""
    if not training or not 0.0 < p < 1.0 or input.numel() == 0 or not input.requires_grad:
        return F.dropout(input, p, training, inplace)
    part = rematerialization.part_of(input)
    output = run(_Dropout, input, p, inplace)
    if part is None or (inplace and (input._is_view() or isinstance(part, Tensor))):
        return output
    node: Any = output.grad_fn
    packed, stride = node.packed(), node.stride
    if packed is None:
        return output
    return rematerialization.publish(output, lambda x, packed: _drop(x, packed, stride, p), part, packed)
