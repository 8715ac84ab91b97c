"""Sparse gradients of embeddings over fake tensors, as large as they can be: no index is a padding, and none is there
twice. Torch's general fake implementations make them of no rows at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_MAKE: Any = _aten._sparse_coo_tensor_with_dims_and_tensors.default


def answer_of(func: Any, args: Any) -> Any:
    """The result of an operation on such a gradient; None of any other operation."""
    if func is _SELECT:
        return _selected(*args)
    return _ANSWERS[func](*args) if args[0].layout is torch.sparse_coo else None


def _made(indices: Tensor, values: Tensor, like: Tensor, is_coalesced: bool = False) -> Any:
    form = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device, "is_coalesced": is_coalesced}
    return _MAKE(like.sparse_dim(), like.dense_dim(), like.shape, indices, values, **form)


def _taken(x: Tensor) -> Any:
    """Autograd clones a gradient that is referred to elsewhere, as where a dispatch mode looks on; else takes it."""
    return _made(x._indices(), x._values(), x)


def _added(x: Tensor, y: Tensor, **_: Any) -> Any:
    """One behind the other."""
    return _made(torch.cat([x._indices(), y._indices()], 1), torch.cat([x._values(), y._values()]), x)


def _added_to(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    x.data = _added(x, y)
    return x


def _coalesced(x: Tensor) -> Any:
    indices, values = x._indices(), x._values()
    return _made(torch.empty_like(indices), torch.empty_like(values), x, is_coalesced=True)


_SELECT = _aten.index.Tensor


def _selected(x: Tensor, indices: list[Tensor | None]) -> Tensor | None:
    """What an embedding's backward takes of words, and of their gradients, that are no padding."""
    node = torch._C._current_autograd_node()
    mask = indices[0] if len(indices) == 1 else None
    if node is None or "Embedding" not in node.name() or mask is None or mask.dtype is not torch.bool:
        return None
    return x.flatten(0, mask.dim() - 1).clone()


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.clone.default: _taken,
    _aten.add.Tensor: _added,
    _aten.add_.Tensor: _added_to,
    _aten._coalesce.default: _coalesced,
}
SPARSE = frozenset({_SELECT, *_ANSWERS})
"""Operations that have an answer here, if it is such a gradient that they are asked of."""
