"""Memory of the host that a card copies from and to while the host goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def pinned(num_elements: int, dtype: torch.dtype) -> Tensor:
    """(num_elements,) of page-locked memory, of which torch takes the next power of two of bytes."""
    import torch

    return torch.empty(num_elements, dtype=dtype, device="cpu").pin_memory()


def pinned_bytes(num_bytes: int) -> int:
    """What so many take: CachingHostAllocator.h of torch 2.13."""
    return 1 << max(num_bytes - 1, 0).bit_length()
