"""``CachingAllocator``: memory that torch's CUDA allocator reserves for a sequence of allocations and frees.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13 with the default configuration: ``round_size``, ``get_pool``,
``get_allocation_size``, ``get_free_block`` (best fit), ``should_split``, ``try_merge_blocks``. One stream; no segment
is given back, as none is while the device has room.
"""

from __future__ import annotations

from dataclasses import replace

from ...measure.profiling.allocations import Allocation, Trace
from ...units import MIB
from ..types import Interval
from .free_list import Block, FreeBlocks, replay, round_up

_ROUNDING = 512
"""kMinBlockSize: sizes are rounded up to it, and no smaller rest of a small block is split off."""
_SMALL = MIB
"""kSmallSize: up to it, blocks are of the small pool; no smaller rest of a large block is split off."""
_SMALL_SEGMENT = 2 * MIB
"""kSmallBuffer: what the small pool asks the device for."""
_LARGE_SEGMENT = 20 * MIB
"""kLargeBuffer: what the large pool asks the device for below ``_OWN_SEGMENT``."""
_OWN_SEGMENT = 10 * MIB
"""kMinLargeAlloc: from it on, a segment of its own, a multiple of ``_LARGE_ROUNDING``."""
_LARGE_ROUNDING = 2 * MIB
"""kRoundLarge."""
_CUBLAS = 2 * 4 * MIB + 8 * 16 * 1024
"""cuBLAS's workspace, ``:4096:2:16:8``. Source: aten/src/ATen/cuda/CublasHandlePool.cpp."""
_CUBLAS_NEWER = 32 * MIB
"""The same on Hopper and Blackwell."""
_NEWER = (9, 10, 12)
"""Major compute capabilities of Hopper and Blackwell."""
_LEAST, _MOST = (8, 0), (9, 0)
"""Compute capabilities of a card with the smaller workspace, and of one with the larger."""
_NUM_CUBLAS = 2
"""Workspaces in use: one for the thread that runs forward, one for backward's."""


class CachingAllocator:
    """Segments of a device's memory, cut into blocks; freed blocks are merged with free neighbours and kept for
    reuse."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        """Bytes of all segments."""
        self._pools = {is_small: FreeBlocks() for is_small in (True, False)}

    def allocate(self, num_bytes: int) -> Block | None:
        """A block of at least so many bytes; None for nothing."""
        if num_bytes <= 0:
            return None
        size = round_up(num_bytes, _ROUNDING)
        is_small = size <= _SMALL
        pool = self._pools[is_small]
        block = pool.best_fit(size) or self._new_segment(size)
        rest = block.num_bytes - size
        if rest >= _ROUNDING if is_small else rest > _SMALL:
            pool.split(block, size)
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back, one piece with its free neighbours."""
        if block is not None:
            pool = self._pools[block.num_bytes <= _SMALL]
            pool.keep(pool.merge(block))

    def free_blocks(self) -> list[Block]:
        """What is reserved and not in use."""
        return [block for pool in self._pools.values() for block in pool]

    def _new_segment(self, size: int) -> Block:
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = round_up(size, _LARGE_ROUNDING)
        block = Block(self.reserved_bytes, segment)
        self.reserved_bytes += segment
        return block


def process_interval(
    trace: Trace, tensors: Interval, capability: tuple[int, int] | None, context: Interval
) -> Interval:
    """What the device charges the process at its peak: the context, and what the allocator reserves with what cuBLAS
    and the convolutions work in.

    Args:
        trace: a steady step; where its peak is another than the tensors', what is reserved is taken in proportion.
        tensors: at their peak.
        capability: the card's; None is any.
        context: beside what is reserved.

    Returns:
        At the lower end no kernel takes anything for itself, and a card that is not known is one that gives cuBLAS
        less.
    """
    value = _reserved(trace, _cublas_bytes(capability or _MOST))
    bare = replace(trace, allocations=tuple(_without_scratch(one) for one in trace.allocations))
    least = min(value, _reserved(bare, _cublas_bytes(capability or _LEAST)))
    low, most_likely, high = (
        round(reserved * part / trace.peak_bytes())
        for reserved, part in ((least, tensors.low), (value, tensors.value), (value, tensors.high))
    )
    return Interval(low=context.low + low, value=context.value + most_likely, high=context.high + high)


def _cublas_bytes(capability: tuple[int, int]) -> int:
    return _CUBLAS_NEWER if capability[0] in _NEWER else _CUBLAS


def _reserved(trace: Trace, cublas_bytes: int) -> int:
    allocator = CachingAllocator()
    for _ in range(_NUM_CUBLAS):
        allocator.allocate(cublas_bytes)
    replay(trace, allocator)
    return allocator.reserved_bytes


def _without_scratch(one: Allocation) -> Allocation:
    return replace(one, num_bytes=0) if one.is_scratch else one
