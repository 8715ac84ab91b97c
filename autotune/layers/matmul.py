"""Matrix products: the input is kept only for the weight's gradient, and not saved if it can be rematerialized.

Under autocast the weight is saved as it is, and not its copy in the lower precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import loss, rematerialization
from .graph import autocast_dtype, is_in_checkpoint, run
from .sites import Site

Held = tuple[rematerialization.Remat | None, tuple[Tensor, ...]]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, held: Held) -> Tensor:
        ctx.remat, kept = held
        ctx.dtype = autocast_dtype(x) or x.dtype
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        x = x.to(ctx.dtype)
        if ctx.remat is None and weight.requires_grad:
            kept = (x,)
        ctx.save_for_backward(weight, *kept)
        return F.linear(x, weight, bias).data  # with a bias it is a view, which nobody could change in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if wants_weight:
            x = kept[0] if ctx.remat is None else ctx.remat.build(kept).to(ctx.dtype)
            grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
            del x
        if wants_x:
            grad_x = (rows @ weight.to(ctx.dtype)).view(*grad.shape[:-1], weight.shape[1]).to(ctx.dtypes[0])
        if wants_bias:
            grad_bias = rows.sum(0).to(ctx.dtypes[1])
        return grad_x, grad_weight, grad_bias, None


def linear(site: Site, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``."""
    is_plain = weight.dim() == 2 and weight.numel() > 0 and not input.is_complex() and (bias is None or bias.dim() == 1)
    if not is_plain or not (input.requires_grad or weight.requires_grad):
        return F.linear(input, weight, bias)
    if loss.is_head(weight):
        x = input.to(autocast_dtype(input) or input.dtype)
        if is_in_checkpoint() or _lies_in_rows(x):
            return loss.note_head(F.linear(x, weight, bias), x, weight, bias)
        x = x.contiguous()  # torch keeps such a copy: what is noted is to be what is kept
        logits = F.linear(x, weight)
        return loss.note_head(logits if bias is None else logits.add_(bias.to(x.dtype)), x, weight, bias)
    held = rematerialization.hold(input) if weight.requires_grad else (None, ())
    if weight.requires_grad and held[0] is None and autocast_dtype(input) in (None, input.dtype):
        rematerialization.note_kept(input)
    if held[0] is None and autocast_dtype(input) is None:
        return F.linear(input, weight, bias)
    return run(_Linear, input, weight, bias, held)


def _lies_in_rows(x: Tensor) -> bool:
    """Whether all but the last side are as good as one, which needs no copy."""
    return all(x.stride(side) == x.stride(side + 1) * x.shape[side + 1] for side in range(x.dim() - 2))


def addmm(site: Site, input: Tensor, mat1: Tensor, mat2: Tensor, **rest: Any) -> Tensor:
    """``torch.addmm(bias, x, weight)``, as GPT-2's linear layer calls it."""
    if rest or input.dim() != 1 or not mat2.is_leaf:
        return torch.addmm(input, mat1, mat2, **rest)
    return linear(site, mat1, mat2.t(), input)


class _Product(torch.autograd.Function):
    """A product of two tensors, each of which is needed for the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, product: _Kind, held: tuple[Held, Held]) -> Tensor:
        ctx.remats = [remat for remat, _ in held]
        ctx.product, ctx.shapes = product, (x.shape, y.shape)
        wanted = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        kept = [
            () if not want else (own,) if remat is None else tensors
            for (remat, tensors), own, want in zip(held, (x, y), wanted, strict=True)
        ]
        ctx.split = len(kept[0])
        ctx.save_for_backward(*kept[0], *kept[1])
        return product.forward(x, y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors[: ctx.split], ctx.saved_tensors[ctx.split :]
        grads: list[Tensor | None] = [None, None]
        for mine, other in ((0, 1), (1, 0)):
            if ctx.needs_input_grad[mine]:
                remat = ctx.remats[other]
                value = kept[other][0] if remat is None else remat.build(kept[other])
                grads[mine] = ctx.product.gradients[mine](grad, value).sum_to_size(ctx.shapes[mine])
        return grads[0], grads[1], None, None


@dataclass(frozen=True)
class _Kind:
    forward: Callable[[Tensor, Tensor], Tensor]
    gradients: tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
    """Each factor's gradient from the output's and the other factor."""


_MUL = _Kind(torch.mul, (torch.mul, torch.mul))
_MATMUL = _Kind(torch.matmul, (lambda grad, y: grad @ y.mT, lambda grad, x: x.mT @ grad))
_MATMUL_2D = _Kind(torch.matmul, (lambda grad, y: grad @ y.mT, lambda grad, x: _rows(x).mT @ _rows(grad)))
"""Of matrices with one: its gradient is a product too, not a sum of many."""


def mul(function: Callable[..., Any]) -> Callable[..., Any]:
    """``x * y`` where one of the two is had again from what is kept anyway: a gated MLP."""

    def replacement(site: Site, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not _can_rematerialize(args):
            return function(*args, **kwargs)
        return _product(_MUL, *args)

    return replacement


def matmul(function: Callable[..., Any]) -> Callable[..., Any]:
    """``x @ y`` where one of the two is had again from what is kept anyway: attention's weights behind dropout."""

    def replacement(site: Site, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not _can_rematerialize(args) or autocast_dtype(args[0]) is not None:
            return function(*args, **kwargs)
        x, y = args
        if y.dim() == 2 and x.dim() >= 2 and function is not torch.bmm:
            return _product(_MATMUL_2D, x, y)
        if x.shape[:-2] != y.shape[:-2] or x.dim() < 3:
            return function(x, y)
        return _product(_MATMUL, _flattened(x), _flattened(y))

    return replacement


def _can_rematerialize(args: tuple[Any, ...]) -> bool:
    """Whether these are two tensors of one type, and one of them need not be kept."""
    if len(args) != 2 or not all(isinstance(x, Tensor) and not x.is_complex() for x in args):
        return False
    if args[0].dtype != args[1].dtype:
        return False
    return rematerialization.find(args[0]) is not None or rematerialization.find(args[1]) is not None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _flattened(x: Tensor) -> Tensor:
    """``x``, copied where stock copies it to have one dimension of matrices: a view would keep what it is a view of."""
    return x if x.dim() <= 3 else x.flatten(0, -3).view(x.shape)


def _product(kind: _Kind, x: Tensor, y: Tensor) -> Tensor:
    nothing: Held = (None, ())
    held = (
        rematerialization.hold(x) if y.requires_grad else nothing,
        rematerialization.hold(y) if x.requires_grad else nothing,
    )
    return run(_Product, x, y, kind, held)
