"""A bool, or a small number, in as few bits as it needs. Stock operations only, so that fake tensors pass through."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["keep", "laid_out_as", "pack", "pack_small", "pieces", "unpack", "unpack_small"]

_CHUNK = 2**20
"""Elements that are packed at once: what that takes stays in the cache, and out of the peak."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1, moves their lowest bits into the highest byte."""


def pack(mask: Tensor) -> Tensor:
    """A mask of n elements, fresh from an elementwise operation, as ceil(n / 8) bytes in the order of its memory."""
    flat = mask.as_strided((mask.numel(),), (1,)).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    packed = flat.new_empty(-(-flat.numel() // 8))
    for start in range(0, whole, _CHUNK):
        eights = flat[start : min(start + _CHUNK, whole)].view(torch.int64)
        packed[start // 8 : start // 8 + eights.numel()] = (eights * _GATHER) >> 56
    if whole < flat.numel():
        places = torch.arange(flat.numel() - whole, dtype=torch.uint8, device=flat.device)
        packed[-1] = (flat[whole:] << places).sum(dtype=torch.uint8)
    return packed


def unpack(bits: Tensor, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The mask again, of the size and the layout that it had, as int8: -1 where it holds and 0 elsewhere."""
    byte = torch.arange(256, device=bits.device)
    bit = (byte[:, None] >> torch.arange(8, device=bits.device)) & 1
    table = bit.to(torch.int8).neg_().view(torch.int64).flatten()
    return table.index_select(0, bits.int()).view(torch.int8).as_strided(size, stride)


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where the unpacked mask holds and 0 elsewhere, whatever is there: an infinity times 0 would be NaN."""
    return (x.view(_INTEGERS[x.element_size()]) & mask).view(x.dtype)


def laid_out_as(other: Tensor, x: Tensor) -> Tensor:
    """``x``, copied only where its memory is in another order than that of ``other``, which is dense."""
    if x.stride() == other.stride():
        return x
    return torch.empty_strided(x.size(), other.stride(), dtype=x.dtype, device=x.device).copy_(x)


def pieces(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The elements of dense tensors of one layout, ``size`` at a time, in the order of their memory."""
    flats = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    return zip(*(flat.split(size) for flat in flats), strict=True)


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
