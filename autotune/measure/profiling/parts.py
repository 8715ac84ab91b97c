"""Operations that torch makes of others below what a dispatch mode sees, written out: what they hold for a moment, and
in which order, is then seen as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_LOGSUMEXP = torch.ops.aten.logsumexp.default


def parts_of(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What an operation does, as a function of its arguments; None for any that is seen as it is."""
    if func is _LOGSUMEXP and args[0].is_floating_point() and args[0].numel():
        return _logsumexp
    return None


def is_in_parts(types: Iterable[type]) -> bool:
    """Whether a class of tensors among these makes others of an operation, which a mode sees if it leaves that alone
    (``NotImplemented``)."""
    return any(getattr(one, "in_parts", False) for one in types)


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """The exponentials are there before the result is, which takes their place in no block.

    Source: aten/src/ATen/native/ReduceOps.cpp, logsumexp_out_impl.
    """
    with torch.autocast(x.device.type, enabled=False):
        largest = x.amax(dim, True)
        largest.masked_fill_(largest.abs() == torch.inf, 0)
        exponentials = (x - largest).exp_()
        found = exponentials.sum(dim, keepdim)
        del exponentials
        return found.log_().add_(largest if keepdim else largest.squeeze(dim))
