"""In which order a tensor's dimensions lie in memory, by its sizes and strides."""

from __future__ import annotations

from torch import Tensor


def is_dense(x: Tensor, channels_last: bool = False) -> bool:
    """Whether it has no gaps in this order of dimensions; strides of dimensions of size 1 do not matter."""
    order = [0, *range(2, x.dim()), 1] if channels_last else range(x.dim())
    step = 1
    for dim in reversed(order):
        if x.size(dim) != 1 and x.stride(dim) != step:
            return False
        step *= x.size(dim)
    return True


def is_channels_last(x: Tensor) -> bool:
    """Whether torch takes it for channels_last, by its strides.

    Source: c10/core/MemoryFormat.h, is_channels_last_strides.
    """
    if x.dim() not in (4, 5) or x.stride(1) == 0:
        return False
    least = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.stride(dim) < least or (dim == 0 and least == x.stride(1)):
            return False
        least = x.stride(dim) * max(1, x.size(dim))
    return True
