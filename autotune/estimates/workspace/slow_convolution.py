"""``Convolution``: whether torch computes a convolution itself on a CPU (its "slow" path), and the workspace of that.

Where few threads and a small batch leave oneDNN no advantage, torch unfolds the input into columns and multiplies
matrices. For kernels of one pixel the input is its own columns. Measured with torch.profiler on torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .kernel import Like

_ONEDNN_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_MANY_IMAGES = 16
"""Images from which on oneDNN takes kernels of one pixel even with one thread."""
_MOST_ELEMENTS = 20480
"""Elements of one image up to which torch convolves it itself."""
_LARGE_KERNEL = 4
"""Shortest side of a kernel from which on torch leaves it to oneDNN."""


@dataclass(frozen=True)
class Convolution:
    """The arguments of ``aten.convolution`` that decide who computes it; shapes in place of tensors."""

    x: Like
    weight: Like
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def is_slow(self, num_threads: int) -> bool:
        """Whether torch computes it itself.

        Source: aten/src/ATen/native/Convolution.cpp, use_mkldnn.
        """
        if self.transposed and any(a >= b for a, b in zip(self.output_padding, self.stride, strict=False)):
            return True
        if self.x.dtype != torch.float32:
            return self.x.dtype not in _ONEDNN_TYPES
        batch, sides = self.x.size[0], (1, *self.weight.size[2:])[-2:]
        is_spread = any(one != 1 for one in (*self.stride, *self.dilation))
        if num_threads == 1 and batch < _MANY_IMAGES and not is_spread and sides == (1, 1):
            return True
        is_small = batch <= 1 and math.prod(self.x.size[:4]) <= _MOST_ELEMENTS
        return is_small and self.groups == 1 and min(sides) < _LARGE_KERNEL

    def forward_bytes(self, y: Like) -> int:
        """Workspace of forward: columns, and each group's result before they are concatenated."""
        columns = 0 if self._reads_pixels and not self.transposed else self._columns_bytes(y)
        return columns // self.groups + (y.num_bytes if self.groups > 1 else 0)

    def backward_bytes(self, grad: Like) -> int:
        """Workspace of backward: columns, and each group's gradients."""
        is_volume = len(self.x.size) == 5  # whose gradient is unfolded in any case
        columns = 0 if self._reads_pixels and not is_volume else self._columns_bytes(grad)
        return columns // self.groups + (self.x.num_bytes + self.weight.num_bytes if self.groups > 1 else 0)

    @property
    def _reads_pixels(self) -> bool:
        is_dense = all(one == 1 for one in self.stride) and not any(self.padding)
        return is_dense and math.prod(self.weight.size[2:]) == 1

    def _columns_bytes(self, y: Like) -> int:
        image, frame = (y, self.x) if self.transposed else (self.x, y)
        pixels = image.size[0] * math.prod(frame.size[2:])
        return pixels * image.size[1] * math.prod(self.weight.size[2:]) * image.dtype.itemsize
