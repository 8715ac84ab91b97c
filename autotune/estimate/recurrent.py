"""What oneDNN keeps of a recurrent layer for its backward: torch says nothing of it for tensors without values."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

__all__ = ["RECURRENT_LAYER", "workspace_bytes"]

RECURRENT_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
"""An LSTM's, in one direction: its last result is a workspace."""
_FEW, _MORE = 16, 48
"""Sequences that are run for real: a workspace is affine in their number."""
_NUM_TENSORS = 7
"""Arguments that are tensors: input (steps, batch, features), four weights, hidden and cell state (batch, features)."""


def workspace_bytes(args: tuple[Any, ...]) -> int:
    """Of a layer's call, by what a few sequences of the same length take.

    Args:
        args: its arguments, of tensors with or without values.
    """
    tensors, rest = args[:_NUM_TENSORS], args[_NUM_TENSORS:]
    shapes = tuple((tuple(one.shape), one.dtype) for one in tensors)
    few, more = (_measured(shapes, _hashable(rest), batch) for batch in (_FEW, _MORE))
    return few + (more - few) * (int(tensors[0].shape[1]) - _FEW) // (_MORE - _FEW)


@cache
def _measured(shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...], rest: tuple[Any, ...], batch: int) -> int:
    sizes = [list(shape) for shape, _ in shapes]
    sizes[0][1] = sizes[-2][0] = sizes[-1][0] = batch
    with unset_fake_temporarily(), torch.enable_grad():  # without, it keeps nothing
        tensors = [torch.zeros(size, dtype=dtype) for size, (_, dtype) in zip(sizes, shapes, strict=True)]
        return int(RECURRENT_LAYER(*tensors, *map(_listed, rest))[-1].nbytes)


def _hashable(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(one) if isinstance(one, list) else one for one in rest)


def _listed(one: Any) -> Any:
    return list(one) if isinstance(one, tuple) else one
