"""A bool, or a small number, in as few bits as it needs. Stock operations only, so that fake tensors pass through.

Work goes piece by piece, in the order of memory: what a piece takes stays in the cache, and out of the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .graph import turns

__all__ = ["dense", "pack", "pack_small", "pieces", "unpack", "unpack_small"]

_PIECE = {"cpu": 2**19}
"""Elements of a piece: on a CPU what a cache holds, elsewhere what hides the launch of a kernel."""
_PIECE_ELSEWHERE = 2**26
_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1, moves their lowest bits into the highest byte."""


def dense(x: Tensor, stride: tuple[int, ...] | None = None) -> Tensor:
    """``x``, copied only where its memory has gaps, or another order than ``stride``, a dense tensor's."""
    if stride is None:
        stride = x.stride() if x.is_contiguous() else torch.empty_like(x, device="meta").stride()
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.size(), stride, dtype=x.dtype, device=x.device).copy_(x)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The elements of dense tensors of one layout, in the order of their memory, a piece at a time."""
    size = _piece(tensors[0])
    flats = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    for start in turns(flats[0].numel(), size, flats[0]):
        yield tuple(flat[start : start + size] for flat in flats)


def pack(x: Tensor, test: Callable[[Tensor], Tensor]) -> Tensor:
    """For n elements of a dense tensor whether ``test`` holds, as ceil(n / 8) bytes in the order of memory."""
    packed = x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)
    for (part,), eighths in zip(pieces(x), _eighths(x, packed), strict=True):
        flags = test(part).view(torch.uint8)
        whole = flags.numel() // 8
        eighths[:whole] = (flags[: 8 * whole].view(torch.int64) * _GATHER) >> 56
        if 8 * whole < flags.numel():
            places = torch.arange(flags.numel() - 8 * whole, dtype=torch.uint8, device=x.device)
            eighths[-1] = (flags[8 * whole :] << places).sum(dtype=torch.uint8)
    return packed


def unpack(packed: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The pieces of dense tensors, each with the packed flags of its elements first, a byte of 0 or 1 for each."""
    byte = torch.arange(256, device=packed.device)
    flags = ((byte[:, None] >> torch.arange(8, device=packed.device)) & 1).to(torch.uint8)
    table = flags.view(torch.int64).flatten()
    for parts, eighths in zip(pieces(*tensors), _eighths(tensors[0], packed), strict=True):
        yield table.index_select(0, eighths.int()).view(torch.uint8)[: len(parts[0])], *parts


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


def _piece(x: Tensor) -> int:
    return _PIECE.get(x.device.type, _PIECE_ELSEWHERE)


def _eighths(x: Tensor, packed: Tensor) -> Iterator[Tensor]:
    """The packed flags of each piece of ``x``."""
    size = _piece(x) // 8
    for start in turns(packed.numel(), size, packed):
        yield packed[start : start + size]
