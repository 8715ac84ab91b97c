"""A bool, or a small number, in as few bits as it needs. Stock operations only, so that fake tensors pass through."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "pack_small", "unpack", "unpack_small"]

_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1, moves their lowest bits into the highest byte."""


def pack(mask: Tensor) -> Tensor:
    """A mask of n elements, fresh from an elementwise operation, as ceil(n / 8) bytes in the order of its memory."""
    flat = mask.as_strided((mask.numel(),), (1,)).view(torch.uint8)
    if spare := -flat.numel() % 8:
        flat = torch.cat([flat, flat.new_zeros(spare)])
    return ((flat.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack(bits: Tensor, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The mask again, of the size and the layout that it had."""
    byte = torch.arange(256, device=bits.device)
    table = ((byte[:, None] >> torch.arange(8, device=bits.device)) & 1).to(torch.uint8).view(torch.int64).flatten()
    return table.index_select(0, bits.int()).view(torch.bool).as_strided(size, stride)


def pack_small(numbers: Tensor, num_values: int) -> Tensor:
    """Contiguous uint8 numbers below ``num_values`` <= 256, two bits, four bits or a byte each."""
    width = _width(num_values)
    flat = numbers.flatten()
    if width == 8:
        return flat
    if spare := -flat.numel() % (8 // width):
        flat = torch.cat([flat, flat.new_zeros(spare)])
    columns = flat.view(-1, 8 // width)
    packed = columns[:, 0].clone()
    for column in range(1, 8 // width):
        packed |= columns[:, column] << (column * width)
    return packed


def unpack_small(packed: Tensor, num_values: int, shape: torch.Size) -> Tensor:
    """The numbers again."""
    width = _width(num_values)
    if width == 8:
        return packed.view(shape)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    flat = (packed[:, None] >> shifts) & ((1 << width) - 1)
    return flat.flatten()[: shape.numel()].view(shape)


def _width(num_values: int) -> int:
    return 2 if num_values <= 4 else 4 if num_values <= 16 else 8
