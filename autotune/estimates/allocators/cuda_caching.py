"""``CachingAllocator``: memory that torch's CUDA allocator reserves for a sequence of allocations and frees.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13 with the default configuration: ``round_size``, ``get_pool``,
``get_allocation_size``, ``get_free_block`` (best fit), ``should_split``, ``try_merge_blocks``; where the device has no
more room, ``release_cached_blocks``. One stream.

Of free blocks of one size torch takes the one at the lowest address (``BlockComparatorSize``), here the one in the
newest segment: that the driver's addresses fall from segment to segment is no one's promise. But so, Reformer takes
373.0 MiB and ResNet-50 47.6 a sample, as measured on three cards, and 349.6 and 46.3 with rising ones (``python -m
benchmarks.cards``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ...measure.profiling.allocations import Phase, Trace
from ...units import MIB
from ..types import EstimateOptions, Interval
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
_CUBLAS_AMD = 128 * MIB
"""hipBLAS's on gfx942; the same source."""
_AMD = (9, 4)
"""What torch says for gfx942's compute capability."""
_NEWER = (9, 10, 12)
"""Major compute capabilities of Hopper and Blackwell."""
_LEAST, _MOST = (8, 0), (9, 0)
"""Compute capabilities of a card with the smaller workspace, and of one with the larger."""
_NUM_CUBLAS = 2
"""Workspaces in use: one for the thread that runs forward, one for backward's."""


class Full(Exception):
    """The device has no room for a segment, and none that could be given back."""


class CachingAllocator:
    """Segments of a device's memory, cut into blocks; freed blocks are merged with free neighbours and kept for
    reuse. Segments that are wholly free are given back to the device only where another would not fit."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """
        Args:
            limit_bytes: of all segments, at any time; None for as many as are asked for.
        """
        self.reserved_bytes = self.peak_bytes = 0
        """Bytes of all segments, now and at most."""
        self._limit_bytes = limit_bytes
        self._next_address = 0
        self._pools = {is_small: FreeBlocks() for is_small in (True, False)}

    def allocate(self, num_bytes: int) -> Block | None:
        """A block of at least so many bytes; None for nothing.

        Raises:
            Full: there is no room for it, not even once all free segments are given back.
        """
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
        if not self._has_room(segment):
            self._give_back()
            if not self._has_room(segment):
                raise Full
        self._next_address -= segment
        block = Block(self._next_address, segment)
        self.reserved_bytes += segment
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return block

    def _has_room(self, segment: int) -> bool:
        return self._limit_bytes is None or self.reserved_bytes + segment <= self._limit_bytes

    def _give_back(self) -> None:
        """Give all segments that are wholly free back to the device."""
        for pool in self._pools.values():
            for block in [one for one in pool if one.before is None and one.after is None]:
                pool.take(block)
                self.reserved_bytes -= block.num_bytes


def process_interval(trace: Trace, tensors: Interval, options: EstimateOptions, possible_bytes: int) -> Interval:
    """What the device charges the process at its peak: the context, and what the allocator reserves with what cuBLAS
    and the convolutions work in.

    Args:
        trace: a steady step; where its peak is another than the tensors', what is reserved is taken in proportion.
        tensors: at their peak.
        options: the device, and its limit.
        possible_bytes: most that one kernel may take for itself beside what the trace has.

    Returns:
        At the lower end no kernel takes anything for itself, and a card that is not known is one that gives cuBLAS
        less. At the upper end kernels take what they are known to, or nothing in forward, whichever comes to more:
        activations go into segments that a workspace leaves, and which kernels libraries choose is not told. An end is
        within the limit where the step runs there, if need be by giving cached segments back; else it is what would be
        charged on a larger device. Where a convolution gets no memory for one kernel, it takes another (aten/src/ATen/
        native/cudnn/Conv_v8.cpp, try_configs): what it may take alone does not lift the upper end over the limit.
    """
    capability, context = options.capability, options.context
    limit_bytes = options.limit_bytes if options.calibration is None else None  # it is of what is charged without
    peak_bytes = trace.peak_bytes()

    def charged(replays: _Replays, tensors_bytes: int, context_bytes: int) -> int:
        share = tensors_bytes / peak_bytes
        room = None if limit_bytes is None else int((limit_bytes - context_bytes) / share)
        return context_bytes + round(replays.reserved_bytes(room) * share)

    whole = _Replays(trace, _cublas_bytes(capability or _MOST))
    has_scratch = any(one.is_scratch for one in trace.allocations)
    lean = _Replays(_bare(trace, Phase.FORWARD), _cublas_bytes(capability or _MOST)) if has_scratch else whole
    least = _Replays(_bare(trace, *Phase), _cublas_bytes(capability or _LEAST))
    value = charged(whole, tensors.value, context.value)
    high = max(value, *(charged(one, tensors.high, context.high) for one in (whole, lean)))
    likely, at_most = options.workspaces
    value += round(likely * (value - context.value))
    high += round(at_most * (high - context.high))
    most = high + possible_bytes
    return Interval(
        low=min(value, charged(least, tensors.low, context.low)),
        value=value,
        high=most if limit_bytes is None or high > limit_bytes else min(most, limit_bytes),
    )


class _Replays:
    """Replays of one training, with as much room as it takes, and with less."""

    def __init__(self, trace: Trace, cublas_bytes: int) -> None:
        self._trace, self._cublas_bytes = trace, cublas_bytes

    @cached_property
    def _freely(self) -> int:
        return self._peak_bytes(None)

    def reserved_bytes(self, room: int | None) -> int:
        """Most that is reserved at once: in this room where that is enough, else where there is more."""
        if room is None or self._freely <= room:
            return self._freely
        try:
            return self._peak_bytes(room)
        except Full:
            return self._freely

    def _peak_bytes(self, room: int | None) -> int:
        allocator = CachingAllocator(room)
        for _ in range(_NUM_CUBLAS):
            allocator.allocate(self._cublas_bytes)
        replay(self._trace, allocator)
        return allocator.peak_bytes


def _cublas_bytes(capability: tuple[int, int]) -> int:
    if capability == _AMD:
        return _CUBLAS_AMD
    return _CUBLAS_NEWER if capability[0] in _NEWER else _CUBLAS


def _bare(trace: Trace, *phases: Phase) -> Trace:
    """A step whose kernels take nothing for themselves in some of its phases."""
    allocations = (
        replace(one, num_bytes=0) if one.is_scratch and one.phase in phases else one for one in trace.allocations
    )
    return replace(trace, allocations=tuple(allocations))
