"""What oneDNN and cuDNN keep of a recurrent layer for backward; torch's fake implementation leaves it out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ...internals.fake_tensors import unset_fake_temporarily

RECURRENT_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
"""One direction of an LSTM; its last result is the workspace."""
_CUDNN_KEEPS = 5
"""Numbers for each state of a step that an LSTM's backward needs: four gates and the cell."""
_BATCHES, _LENGTHS = (16, 48), (16, 32)
"""Batches and lengths of sequences that are run for real: a workspace is affine in either."""
_NUM_TENSORS = 7
"""Number of tensor arguments: input (steps, batch, features), four weights, hidden and cell state (batch, features)."""


def workspace_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of the workspace of a layer's call, extrapolated from a few short sequences that are run.

    Args:
        args: its arguments, of fake or real tensors.
    """
    tensors, rest = args[:_NUM_TENSORS], args[_NUM_TENSORS:]
    shapes = tuple((tuple(one.shape), one.dtype) for one in tensors)
    length, batch = map(int, tensors[0].shape[:2])
    short, long = (
        _extended(batch, _BATCHES, [_measured(shapes, _hashable(rest), steps, size) for size in _BATCHES])
        for steps in _LENGTHS
    )
    return round(_extended(length, _LENGTHS, [short, long]))


def reserve_bytes(args: tuple[Any, ...]) -> int:
    """Bytes that cuDNN keeps of a layer's call for backward: as many as it needs, in its input's precision.

    Args:
        args: its arguments, of fake or real tensors.
    """
    x, cell = args[0], args[_NUM_TENSORS - 1]
    return int(_CUDNN_KEEPS * x.size(0) * x.size(1) * cell.size(-1) * x.element_size())


def _extended(at: int, places: tuple[int, int], values: Sequence[float]) -> float:
    """Linear extrapolation from two points."""
    return values[0] + (values[1] - values[0]) * (at - places[0]) / (places[1] - places[0])


@cache
def _measured(
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...], rest: tuple[Any, ...], steps: int, batch: int
) -> int:
    sizes = [list(shape) for shape, _ in shapes]
    sizes[0][0] = steps
    sizes[0][1] = sizes[-2][0] = sizes[-1][0] = batch
    with unset_fake_temporarily(), torch.enable_grad():  # without, it keeps nothing
        tensors = [torch.zeros(size, dtype=dtype) for size, (_, dtype) in zip(sizes, shapes, strict=True)]
        return int(RECURRENT_LAYER(*tensors, *map(_listed, rest))[-1].nbytes)


def _hashable(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(one) if isinstance(one, list) else one for one in rest)


def _listed(one: Any) -> Any:
    return list(one) if isinstance(one, tuple) else one
