"""``CachingAllocator``: what CUDA's allocator reserves for a sequence of allocations and frees, by torch's own rules.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13 with the default configuration: ``round_size``, ``get_pool``,
``get_allocation_size``, ``get_free_block`` (best fit), ``should_split``, ``try_merge_blocks``. One stream; no segment
is given back, as none is while the device has room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from ..measure.allocations import Allocation, Trace
from ..units import MIB

__all__ = ["CachingAllocator", "base_bytes", "reserved_bytes"]

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
_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
"""What cuBLAS is given: ``:4096:2:16:8``. Source: aten/src/ATen/cuda/CublasHandlePool.cpp; 32 MiB on Hopper."""
_NUM_WORKSPACES = 2
"""One for each handle: of the thread that runs forward, and of the one that runs backward."""
_CONTEXT = 512 * MIB
"""What a context takes with torch's kernels loaded: 300 to 500 MiB are seen, by card and driver."""


@dataclass(slots=True)
class _Block:
    address: int
    num_bytes: int
    is_small: bool
    before: _Block | None = None
    after: _Block | None = None
    """Neighbours in the same segment."""
    is_free: bool = False

    def key(self) -> tuple[int, int]:
        return self.num_bytes, self.address


class CachingAllocator:
    """Segments of a device cut into blocks; freed blocks are merged with free neighbours and kept for reuse."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        """Of all segments."""
        self._free: dict[bool, list[tuple[tuple[int, int], _Block]]] = {True: [], False: []}
        """By pool, small or not, in order of size and address."""

    def allocate(self, num_bytes: int) -> _Block | None:
        """A block of at least so many bytes; None for nothing."""
        if num_bytes <= 0:
            return None
        size = _round_up(num_bytes, _ROUNDING)
        block = self._best_fit(size) or self._new_segment(size)
        rest = block.num_bytes - size
        if rest >= _ROUNDING if block.is_small else rest > _SMALL:
            self._split(block, size)
        return block

    def free(self, block: _Block | None) -> None:
        """Give a block back, one piece with its free neighbours."""
        if block is None:
            return
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._take(neighbour)
                block = _merged(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        self._keep(block)

    def free_blocks(self) -> list[_Block]:
        """What is reserved and not in use."""
        return [block for pool in self._free.values() for _, block in pool]

    def _best_fit(self, size: int) -> _Block | None:
        pool = self._free[size <= _SMALL]
        at = bisect_left(pool, size, key=lambda row: row[0][0])
        if at == len(pool):
            return None
        block = pool[at][1]
        self._take(block)
        return block

    def _new_segment(self, size: int) -> _Block:
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = _round_up(size, _LARGE_ROUNDING)
        block = _Block(self.reserved_bytes, segment, size <= _SMALL)
        self.reserved_bytes += segment
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.num_bytes - size, block.is_small, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.num_bytes, block.after = size, rest
        self._keep(rest)

    def _keep(self, block: _Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.key(), block), key=lambda row: row[0])

    def _take(self, block: _Block) -> None:
        block.is_free = False
        pool = self._free[block.is_small]
        del pool[bisect_left(pool, block.key(), key=lambda row: row[0])]


def _merged(first: _Block, second: _Block) -> _Block:
    first.num_bytes += second.num_bytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


def reserved_bytes(trace: Trace) -> int:
    """What the allocator reserves for a training whose steady step this is: cuBLAS's workspaces, then parameters, a
    first step that makes the optimizer's state, and two that have it."""
    allocator = CachingAllocator()
    for _ in range(_NUM_WORKSPACES):
        allocator.allocate(_WORKSPACE)
    before = [one for one in trace.allocations if one.born == 0]
    late = [one for one in before if one.kind == "optimizer_state"]
    lasting = {one.id: allocator.allocate(one.num_bytes) for one in before if one not in late}
    optimizer = next((span.start for span in trace.spans if span.phase == "optimizer"), None)
    for step in range(3):
        blocks: dict[int, _Block | None] = {}
        for moment, one, is_birth in _events(trace):
            if late and step == 0 and optimizer is not None and moment >= optimizer:
                lasting.update((state.id, allocator.allocate(state.num_bytes)) for state in late)
                late = []
            if is_birth:
                blocks[one.id] = allocator.allocate(one.num_bytes)
            elif one.id in blocks:
                allocator.free(blocks.pop(one.id))
            else:
                allocator.free(lasting.pop(one.id, None))
        for left in blocks.values():  # what outlives its step gives way to the next one's
            allocator.free(left)
    return allocator.reserved_bytes


def base_bytes() -> int:
    """What the device charges a process beside what its allocator has reserved."""
    return _CONTEXT


def _events(trace: Trace) -> Iterator[tuple[int, Allocation, bool]]:
    """Moment, allocation, and whether it is made (or freed), in order; at one moment, frees first."""
    born = [(one.born, 1, one.id, one) for one in trace.allocations if one.born > 0]
    died = [(one.died, 0, one.id, one) for one in trace.allocations if one.died is not None]
    for moment, is_birth, _, one in sorted([*born, *died], key=lambda row: row[:3]):
        yield moment, one, bool(is_birth)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
