"""``Heap``: resident memory under glibc's malloc for a sequence of allocations and frees.

Source: malloc/malloc.c of glibc 2.36: ``_int_memalign`` (more is sought than is kept, so that a block does not fit into
the hole that one of its size has left), ``_int_malloc`` (best fit), ``sysmalloc`` (mmap from a threshold on),
``_int_free`` (merging, trimming at the top), and the threshold that grows with what is unmapped. One arena; what is
freed below the top stays resident.
"""

from __future__ import annotations

import math
import random

from ...measure.profiling.allocations import Phase, Trace
from ...units import MIB
from .free_list import Block, FreeBlocks, cut, replay, round_up

_ALIGNMENT = 64
"""That torch asks for. Source: c10/core/alignment.h, gAlignment."""
_HEADER = 16
"""Bytes between a chunk's start and its owner's data."""
_PAGE = 4096
_PAD = 128 * 1024
"""DEFAULT_TOP_PAD: added to what the top is grown by, and kept when it is trimmed."""
_THRESHOLD = 128 * 1024
"""DEFAULT_MMAP_THRESHOLD, and DEFAULT_TRIM_THRESHOLD."""
_MOST_THRESHOLD = 32 * MIB
"""DEFAULT_MMAP_THRESHOLD_MAX."""
_LEAST = 32
"""MINSIZE of a chunk."""
_MAPPED = -1
"""Marks an address as a mapping of its own."""
_BESIDE = (48, 112, 64, 48)
"""Sizes of small chunks that come with each tensor, the first before its data, the others after. Two fifths of a logged
training's chunks were of these sizes; which objects they are is not known. Chosen, with ``_LATER``, as the best of a
dozen variants."""
_LATER = 150
"""Number of small chunks that outlive their tensors; they are freed in random order."""
_TURNOVER = 4.0
"""Turnover (bytes that a micro-batch allocates, over bytes alive at the peak) at which the replayed slack is right.
Measured slack grows about with its root: four trainings, 248 configurations."""
_CACHED = 7
"""TCACHE_FILL_COUNT: freed chunks of each size that are kept for reuse and not merged."""


class Heap:
    """The main arena, and mappings beside it: from a threshold on that is fixed, or grows with what is unmapped."""

    def __init__(self, threshold: int | None = None) -> None:
        self.peak_bytes = 0
        """Most bytes resident so far."""
        self._free = FreeBlocks()
        self._last: Block | None = None
        """The block below the top."""
        self._top = self._end = self._touched = self._mapped = 0
        self._grows = threshold is None
        self._threshold = threshold or _THRESHOLD
        self._trim_at = 2 * threshold if threshold else _THRESHOLD

    def allocate(self, num_bytes: int) -> Block | None:
        """A block of at least so many bytes; None for nothing."""
        if num_bytes <= 0:
            return None
        kept = max(_LEAST, round_up(num_bytes + _HEADER // 2, 16))
        sought = kept + _ALIGNMENT + _LEAST
        block = self._free.best_fit(sought)
        if block is not None:
            block = self._trimmed(block, kept)
        elif self._end - self._top < sought + _LEAST and sought >= self._threshold:
            block = Block(_MAPPED, round_up(sought, _PAGE))
            self._mapped += block.num_bytes
        else:
            block = self._trimmed(self._from_top(sought), kept)
        self.peak_bytes = max(self.peak_bytes, self._mapped + self._touched)
        return block

    def chunk(self, num_bytes: int) -> Block:
        """A small chunk of exactly so many bytes, header included, aligned to 16."""
        block = self._free.best_fit(num_bytes) or self._from_top(num_bytes)
        if block.num_bytes > num_bytes + _LEAST:
            self.free(self._cut(block, num_bytes))
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back."""
        if block is None:
            return
        if block.address == _MAPPED:
            self._unmap(block)
            return
        block = self._free.merge(block)
        if block.after is not None:
            self._free.keep(block)
            return
        self._last, self._top = block.before, block.address
        if self._last is not None:
            self._last.after = None
        if self._end - self._top >= self._trim_at:
            self._end = round_up(self._top + _PAD, _PAGE)
            self._touched = min(self._touched, self._end)

    def _trimmed(self, block: Block, kept: int) -> Block:
        """Align a taken block; give back what is before and behind it."""
        lead = -(block.address + _HEADER) % _ALIGNMENT
        if 0 < lead < _LEAST:
            lead += _ALIGNMENT
        if lead:
            block = self._cut(block, lead)
            assert block.before is not None, "it was cut off"
            self.free(block.before)
        if block.num_bytes > kept + _LEAST:
            self.free(self._cut(block, kept))
        return block

    def _cut(self, block: Block, num_bytes: int) -> Block:
        """Cut a taken block in two, and return the second part; both count as taken."""
        second = cut(block, num_bytes)
        if self._last is block:
            self._last = second
        return second

    def _from_top(self, size: int) -> Block:
        missing = size + _LEAST - (self._end - self._top)
        if missing > 0:
            self._end = round_up(self._end + missing + _PAD, _PAGE)
        block = Block(self._top, size, self._last)
        if self._last is not None:
            self._last.after = block
        self._last, self._top = block, self._top + size
        self._touched = max(self._touched, self._top)
        return block

    def _unmap(self, block: Block) -> None:
        self._mapped -= block.num_bytes
        if self._grows and self._threshold < block.num_bytes <= _MOST_THRESHOLD:
            self._threshold, self._trim_at = block.num_bytes, 2 * block.num_bytes


class TensorHeap:
    """A heap in which each tensor has small objects beside its data.

    The small objects lie where there was room when they were made, outlive their neighbours, and keep free blocks from
    merging into one that is large enough for the next tensor. Without them, the heap of a logged training was predicted
    at a quarter of its size.
    """

    def __init__(self, threshold: int | None = None) -> None:
        self.heap = Heap(threshold)
        self._random = random.Random(0)
        self._left: list[tuple[int, Block]] = []
        self._cached: tuple[list[Block], ...] = tuple([] for _ in _BESIDE)

    def allocate(self, num_bytes: int) -> tuple[Block | None, list[tuple[int, Block]]]:
        """Allocate a tensor's data, and its small objects."""
        if num_bytes <= 0:
            return None, []
        first = self._object(0)
        data = self.heap.allocate(num_bytes)
        return data, [first, *map(self._object, range(1, len(_BESIDE)))]

    def free(self, tensor: tuple[Block | None, list[tuple[int, Block]]]) -> None:
        """Free the data, and as many small objects as there are too many of."""
        data, objects = tensor
        self.heap.free(data)
        self._left += objects
        while len(self._left) > _LATER:
            at = self._random.randrange(len(self._left))
            self._left[at], self._left[-1] = self._left[-1], self._left[at]
            number, block = self._left.pop()
            if len(self._cached[number]) < _CACHED:
                self._cached[number].append(block)
            else:
                self.heap.free(block)

    def _object(self, number: int) -> tuple[int, Block]:
        cached = self._cached[number]
        return number, cached.pop() if cached else self.heap.chunk(_BESIDE[number])


def resident_peak_bytes(trace: Trace, threshold: int | None = None) -> int:
    """Most bytes that glibc's malloc keeps resident for a training with this steady step.

    Args:
        trace: of the step.
        threshold: bytes from which on it maps; None is its own, which grows.
    """
    tensors = TensorHeap(threshold)
    replay(trace, tensors)
    least = trace.peak_bytes()
    passes = sum(span.phase == Phase.FORWARD for span in trace.spans)
    turnover = sum(one.num_bytes for one in trace.allocations if one.born > 0) / max(1, passes * least)
    return least + round(max(0, tensors.heap.peak_bytes - least) * math.sqrt(turnover / _TURNOVER))
