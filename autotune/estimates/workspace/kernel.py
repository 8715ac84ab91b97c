"""``Kernel``: an operation with a workspace, which it allocates while it runs, at any batch; its number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

HALVES = (torch.bfloat16, torch.float16)
"""Types of half precision."""
_num_threads: int | None = None
"""None where it is as many as this process has."""


@dataclass(frozen=True)
class Like:
    """Shape, strides and type of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Product of its sizes."""
        return math.prod(self.size)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.num_elements * self.dtype.itemsize

    def is_dense(self, channels_last: bool = False) -> bool:
        """Whether it has no gaps in this order of dimensions; strides of dimensions of size 1 do not matter."""
        order = [0, *range(2, len(self.size)), 1] if channels_last else range(len(self.size))
        step = 1
        for dim in reversed(order):
            if self.size[dim] != 1 and self.stride[dim] != step:
                return False
            step *= self.size[dim]
        return True

    def is_channels_last(self) -> bool:
        """Whether torch takes it for channels_last, by its strides.

        Source: c10/core/MemoryFormat.h, is_channels_last_strides.
        """
        if len(self.size) not in (4, 5) or self.stride[1] == 0:
            return False
        least = 0
        for dim in (1, *range(len(self.size) - 1, 1, -1), 0):
            if self.stride[dim] < least or (dim == 0 and least == self.stride[1]):
                return False
            least = self.stride[dim] * max(1, self.size[dim])
        return True

    def extended(self, other: Like, steps: float) -> Like:
        """Sizes and strides extrapolated linearly from this one and another, ``steps`` times their difference from this
        one."""
        size, stride = (
            tuple(round(a + (b - a) * steps) for a, b in zip(own, their, strict=True))
            for own, their in ((self.size, other.size), (self.stride, other.stride))
        )
        return Like(size, stride, self.dtype)


def like(x: Tensor) -> Like:
    """The :class:`Like` of a tensor; one without strides counts as a number."""
    if x.layout != torch.strided:
        return Like((), (), x.dtype)
    return Like(tuple(x.size()), x.stride(), x.dtype)


def _likes(tree: Any) -> Any:
    """Arguments with the :class:`Like` of each tensor in its place."""
    if isinstance(tree, Tensor):
        return like(tree)
    if isinstance(tree, dict):
        return {key: _likes(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_likes(value) for value in tree] if isinstance(tree, list) else tuple(map(_likes, tree))
    return tree


@dataclass(frozen=True)
class Kernel:
    """An operation, with the shapes of its tensors."""

    scratch: Callable[..., int]
    """Workspace in bytes, beside the results, as a function of results and arguments."""
    results: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, scratch: Callable[..., int], results: Any, args: Any, kwargs: Any) -> Kernel:
        """The kernel of an operation on these tensors."""
        return cls(scratch, _likes(results), _likes(args), _likes(kwargs))

    def num_bytes(self) -> int:
        """Bytes of its workspace."""
        return self.scratch(self.results, *self.args, **self.kwargs)

    def extended(self, other: Kernel, steps: float) -> Kernel:
        """The operation with each size extrapolated linearly from this one's and another's."""

        def extend(own: Any, their: Any) -> Any:
            return own.extended(their, steps) if isinstance(own, Like) and isinstance(their, Like) else own

        trees = ((self.results, other.results), (self.args, other.args), (self.kwargs, other.kwargs))
        return Kernel(self.scratch, *(tree_map(extend, own, their) for own, their in trees))


def reckon_with(num_threads: int) -> None:
    """Set how many threads the predicted training computes with, whatever this process has."""
    global _num_threads
    _num_threads = num_threads


def num_threads() -> int:
    """Threads of the predicted training."""
    return _num_threads or torch.get_num_threads()
