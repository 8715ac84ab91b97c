"""A bool, or a small number, in as few bits as it needs. Stock operations only, so that fake tensors pass through.

Work goes piece by piece, in the order of memory: what a piece takes stays in the cache, and out of the peak.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..internals.fake_tensors import FakeTensor, device_type
from .graph import turns

_PIECE = {"cpu": 2**19}
"""Elements of a piece: on a CPU what a cache holds, elsewhere what hides the launch of a kernel."""
_PIECE_ELSEWHERE = 2**26


def dense(x: Tensor, stride: tuple[int, ...] | None = None) -> Tensor:
    """``x``, copied only where its memory has gaps, or another order than ``stride``, a dense tensor's."""
    if stride is None:
        stride = x.stride() if x.is_contiguous() else torch.empty_like(x, device="meta").stride()
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.size(), stride, dtype=x.dtype, device=x.device).copy_(x)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The elements of dense tensors of one layout, in the order of their memory, a piece at a time."""
    flats = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    yield from zip(*(_split(flat, _piece(flat)) for flat in flats), strict=True)


def pack(test: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Whether ``test`` holds, for each of the n elements of dense tensors of one layout, as ceil(n / 8) bytes.

    ``test`` is called with each of their :func:`pieces`, once and in turn, and may write to them. Bit i of a piece's m
    bytes holds its elements i * m to (i + 1) * m - 1: a CPU joins whole runs in less time than eight neighbours.
    """
    first = tensors[0]
    packed = first.new_empty(-(-first.numel() // 8), dtype=torch.uint8)
    for parts, eighths in zip(pieces(*tensors), _split(packed, _piece(first) // 8), strict=True):
        flags = test(*parts).view(torch.uint8)
        if spare := -flags.numel() % 8:
            flags = torch.cat([flags, flags.new_zeros(spare)])
        fours = torch.add(*flags.view(2, 4, -1).unbind(), alpha=16)
        twos = torch.add(*fours.view(2, 2, -1).unbind(), alpha=4)
        torch.add(*twos.unbind(), alpha=2, out=eighths)
    return packed


def unpack(packed: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The pieces of dense tensors, each with the packed flags of its elements first, as bytes: 0 where unset."""
    masks = packed.new_empty((8, 1)) if isinstance(packed, FakeTensor) else _masks(packed.device)
    for parts, eighths in zip(pieces(*tensors), _split(packed, _piece(packed) // 8), strict=True):
        yield (eighths & masks).flatten()[: len(parts[0])], *parts


@functools.cache
def _masks(device: torch.device) -> Tensor:
    return (1 << torch.arange(8, dtype=torch.uint8, device=device))[:, None]


def is_nonzero(x: Tensor) -> Tensor:
    """NaN too. On a CPU this takes a fifth of the time of a comparison."""
    return x.to(torch.bool)


def pack_small(numbers: Tensor, num_values: int) -> Tensor:
    """Contiguous uint8 numbers below ``num_values`` <= 256, two bits, four bits or a byte each."""
    width = _width(num_values)
    flat = numbers.flatten()
    if width == 8:
        return flat
    if spare := -flat.numel() % (8 // width):
        flat = torch.cat([flat, flat.new_zeros(spare)])
    runs = flat.view(8 // width, -1)
    packed = runs[0].clone()
    for number in range(1, 8 // width):
        packed |= runs[number] << (number * width)
    return packed


def unpack_small(packed: Tensor, num_values: int, shape: torch.Size) -> Tensor:
    """The numbers again."""
    width = _width(num_values)
    if width == 8:
        return packed.view(shape)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    flat = (packed >> shifts[:, None]) & ((1 << width) - 1)
    return flat.flatten()[: shape.numel()].view(shape)


def _width(num_values: int) -> int:
    return 2 if num_values <= 4 else 4 if num_values <= 16 else 8


def _piece(x: Tensor) -> int:
    return _PIECE.get(device_type(x), _PIECE_ELSEWHERE)


def _split(flat: Tensor, size: int) -> tuple[Tensor, ...]:
    """Without a call of torch where it is one piece: in a small model such calls are what a step takes longer."""
    if flat.numel() > size:
        return tuple(flat[start : start + size] for start in turns(flat.numel(), size, flat))
    return (flat,) if flat.numel() else ()
