"""Memory of the host that a card copies from and to while the host goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...units import MIB

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def pinned(num_elements: int, dtype: torch.dtype) -> Tensor:
    """(num_elements,) of page-locked memory, of which torch takes the next power of two of bytes."""
    import torch

    return torch.empty(num_elements, dtype=dtype, device="cpu").pin_memory()


def split(num_bytes: int) -> list[int]:
    """Into what so many are split, that torch takes at most a sixteenth more for them, or a mebibyte."""
    found, left = [], num_bytes
    while left > max(num_bytes // 16, MIB):
        found.append(1 << (left.bit_length() - 1))
        left -= found[-1]
    return [*found, left] if left else found


def pinned_bytes(num_bytes: int) -> int:
    """What so many take: CachingHostAllocator.h of torch 2.13."""
    return 1 << max(num_bytes - 1, 0).bit_length()
