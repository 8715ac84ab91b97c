"""A tensor's elements in the order in which they lie in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def flat(tensor: Tensor) -> Tensor:
    """The elements in that order, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether they lie there without gaps, each once."""
    expected = 1
    for stride, side in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if side > 1 and stride != expected:
            return False
        expected *= side
    return True


def of_strides(tensor: Tensor) -> Tensor:
    """Room in the host's memory for as many, in the same order."""
    import torch

    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
