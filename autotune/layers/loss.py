"""Cross-entropy of a linear layer's output: the gradient is formed in forward, a few rows at a time.

Stock torch keeps the logarithm of the softmax, as large as the logits, and makes two more such tensors in backward: for
a language model often the peak. Here the gradients of the linear layer's input and weight are kept instead.
Source: Liger Kernel's fused linear cross-entropy, Hsu et al. 2024, arXiv:2410.10989.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..internals.fake_tensors import FakeTensor, device_type
from .graph import autocast_dtype, notes_of, run, turns
from .rematerialization import Unchanged
from .sites import Site

_KEY = "autotune.head"
_HEAD = 8
"""Outputs over inputs of a linear layer from which it is taken for a head over a vocabulary."""
_CHUNK = {"cpu": 2**20}
_CHUNK_ELSEWHERE = 2**25
"""Logits that are worked on at once: on a CPU what a cache holds. Elsewhere each turn reads the whole head and its
gradient, and has a dozen launches: about as many rows as Liger takes of a model of 4,096 and 128,000 words."""
_DTYPES = (torch.float32, torch.bfloat16)
"""Of a head's input. In fp16 a gradient that no loss scale has been applied to yet would vanish."""
_PASSED = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0"))
"""Nodes between a head and its loss that leave every logit where it is."""


def is_head(weight: Tensor) -> bool:
    """Whether a linear layer has so many outputs that its loss is worth forming at once."""
    return weight.shape[0] >= _HEAD * weight.shape[1]


def note_head(logits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Note on ``logits``' node what they are the linear map of; returns them.

    A frozen head does not keep its input, and its gradient does not read it: a stand-in without data is noted.
    """
    if logits.grad_fn is not None:
        stand_in = None if weight.requires_grad else run(_StandIn, x)
        refs = [None if part is None else Unchanged(part) for part in (x, weight, bias)]
        hooks: OrderedDict[int, Any] = OrderedDict()
        logits._backward_hooks = hooks  # as Tensor.register_hook does: what a user registers is found here later
        logits.grad_fn._register_hook_dict(logits)
        notes_of(logits.grad_fn)[_KEY] = refs, stand_in, TensorWeakRef(logits), logits._version, hooks
    return logits


def note_head_of_codes(logits: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of a frozen head whose ``numbers()`` are made anew from codes; of any other, nothing."""
    if not hasattr(weight, "numbers") or not is_head(weight) or input.is_complex():
        return logits
    return note_head(logits, input.to(autocast_dtype(input) or input.dtype), weight, bias)


class _StandIn(torch.autograd.Function):
    """A tensor as large as ``x``, of one element's memory, whose gradient is ``x``'s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.size())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _head_of(logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    node: Any = logits.grad_fn
    while node is not None and _KEY not in notes_of(node):
        node = node.next_functions[0][0] if node.name() in _PASSED else None
    if node is None:
        return None
    refs, stand_in, noted, version, hooks = notes_of(node)[_KEY]
    whole = noted()
    if hooks or (whole is not None and (whole.retains_grad or whole._version != version)):
        return None
    x, weight, bias = (None if ref is None else ref() for ref in refs)
    x = x if stand_in is None else stand_in
    return None if x is None or weight is None or (bias is None and refs[2] is not None) else (x, weight, bias)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        logits: Tensor,
        target: Tensor,
        options: tuple[int, str, torch.dtype],
    ) -> Tensor:
        ignore_index, reduction, dtype = options
        valid = target != ignore_index
        target = torch.where(valid, target, 0)
        scale = 1.0 / valid.sum() if reduction == "mean" else torch.ones((), device=logits.device)
        scales = torch.where(valid, scale, 0.0)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_x = torch.empty(x.size(), dtype=x.dtype, device=x.device) if wants_x else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        cast = (weight.numbers() if hasattr(weight, "numbers") else weight).to(x.dtype)
        loss = torch.zeros((), device=logits.device)
        for rows in _chunks(logits):
            part, index = torch.log_softmax(logits[rows].float(), -1), target[rows, None]
            loss -= torch.where(valid[rows], part.gather(1, index)[:, 0], 0.0).sum()
            part.exp_().scatter_add_(1, index, part.new_full(index.shape, -1.0)).mul_(scales[rows, None])
            if grad_bias is not None:
                grad_bias += part.sum(0)
            part = part.to(x.dtype)
            if grad_x is not None:
                torch.mm(part, cast, out=grad_x[rows])
            if grad_weight is not None:
                # Into the sum itself where the types agree: a product of its own is as large as the head.
                same = part.dtype == torch.float32
                grad_weight.addmm_(part.t(), x[rows]) if same else grad_weight.add_(part.t() @ x[rows])
            del part, index  # before the next ones are there
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return (loss * scale).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        if not _is_one(grad):
            grad_x, grad_weight, grad_bias = (_scaled(one, grad) for one in ctx.saved_tensors)
        return (
            grad_x,
            None if grad_weight is None else grad_weight.to(weight_dtype),
            None if grad_bias is None else grad_bias.to(bias_dtype),
            None,
            None,
            None,
        )


def _scaled(x: Tensor | None, grad: Tensor) -> Tensor | None:
    """In place, since a copy of the head's gradient may be the peak; but not where another backward is to find it."""
    if x is None:
        return None
    grad = grad.to(x.dtype)
    return x * grad if torch._C._autograd._get_current_graph_task_keep_graph() else x.mul_(grad)


def _is_one(grad: Tensor) -> bool:
    """Whether nothing is to be scaled: a loss's own gradient, read where that does not wait for a device."""
    return isinstance(grad, FakeTensor) or (grad.device.type == "cpu" and grad.item() == 1.0)


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK.get(device_type(logits), _CHUNK_ELSEWHERE) // logits.shape[1])
    for start in turns(logits.shape[0], rows, logits):
        yield slice(start, start + rows)


def cross_entropy(
    site: Site, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """``F.cross_entropy``."""
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    has_rows = input.dim() == 2 and target.dtype == torch.long and target.shape == input.shape[:1]
    is_watched = bool(input._backward_hooks) or input.retains_grad
    head = _head_of(input) if is_plain and has_rows and reduction in ("mean", "sum") and not is_watched else None
    if head is None or head[0].dtype not in _DTYPES or not _pays(input, head[0], head[1]):
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    x, head_weight, bias = head
    dtype = input.dtype if autocast_dtype(input) is None else torch.float32
    with torch.autocast(input.device.type, enabled=False):
        options = (ignore_index, reduction, dtype)
        flat = x.reshape(-1, x.shape[-1])
        return run(_LinearCrossEntropy, flat, head_weight, bias, input.detach(), target, options)


def _pays(logits: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether every row is there, and the gradients that are kept instead take less than the logits."""
    kept = x.nbytes + (4 * weight.numel() if weight.requires_grad else 0)
    return x.device == logits.device and x.numel() == len(logits) * x.shape[-1] and kept < logits.nbytes
