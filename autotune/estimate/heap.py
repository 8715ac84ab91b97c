"""``Heap``: what a process keeps resident for a sequence of allocations and frees, by glibc's own rules.

Source: malloc/malloc.c of glibc 2.36: ``_int_memalign`` (more is sought than is kept, so that a block does not fit into
the hole that one of its size has left), ``_int_malloc`` (best fit), ``sysmalloc`` (mmap from a threshold on),
``_int_free`` (merging, trimming at the top), and the threshold that grows with what is unmapped. One arena; what is
freed below the top stays resident.
"""

from __future__ import annotations

import math
import random

from ..measure.allocations import Trace
from ..units import MIB
from .blocks import Block, FreeBlocks, replay, round_up

__all__ = ["Heap", "TensorHeap", "resident_peak_bytes"]

_ALIGNMENT = 64
"""That torch asks for. Source: c10/core/alignment.h, gAlignment."""
_HEADER = 16
"""From a chunk's start to what its owner gets."""
_PAGE = 4096
_PAD = 128 * 1024
"""DEFAULT_TOP_PAD: what the top is grown by on top of what is asked for, and keeps when it is trimmed."""
_THRESHOLD = 128 * 1024
"""DEFAULT_MMAP_THRESHOLD, and DEFAULT_TRIM_THRESHOLD."""
_MOST_THRESHOLD = 32 * MIB
"""DEFAULT_MMAP_THRESHOLD_MAX."""
_LEAST = 32
"""MINSIZE of a chunk."""
_MAPPED = -1
"""For an address: a mapping of its own."""
_BESIDE = (48, 112, 64, 48)
"""Small chunks that come with a tensor besides its data, the first before it, the others after. Of these sizes were two
fifths of a logged training's; which objects they are was not looked into. Chosen, with ``_LATER``, among a dozen
variants by how near the predictions came."""
_LATER = 150
"""So many of them outlive their tensors, and go in no order."""
_TURNOVER = 4.0
"""How often a micro-batch makes as many bytes as are alive at the peak where the replayed slack is right: what is
measured grows about with the root of it. Four trainings, 248 configurations."""
_CACHED = 7
"""TCACHE_FILL_COUNT: so many freed chunks of each size are kept for the next, and not merged."""


class Heap:
    """The main arena, and mappings beside it."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Most that was resident."""
        self._free = FreeBlocks()
        self._last: Block | None = None
        """Below the top."""
        self._top = self._end = self._touched = self._mapped = 0
        self._threshold = self._trim_at = _THRESHOLD

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
        """A small one of exactly so many bytes, header included, aligned to 16."""
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
        """Of a block that was taken, an aligned one; what is before and behind it is given back."""
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
        """The second part of a block that was taken."""
        second = self._free.take(self._free.split(block, num_bytes))
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
        if self._threshold < block.num_bytes <= _MOST_THRESHOLD:
            self._threshold, self._trim_at = block.num_bytes, 2 * block.num_bytes


class TensorHeap:
    """A heap in which each tensor has small objects besides its data.

    They lie where there was room when they were made, outlive what lay beside them, and keep two free neighbours from
    becoming one that is large enough for the next tensor: without them, the heap of a logged training was a quarter
    of what it is.
    """

    def __init__(self) -> None:
        self.heap = Heap()
        self._random = random.Random(0)
        self._left: list[tuple[int, Block]] = []
        self._cached: tuple[list[Block], ...] = tuple([] for _ in _BESIDE)

    def allocate(self, num_bytes: int) -> tuple[Block | None, list[tuple[int, Block]]]:
        """A tensor's data, and what comes with it, by its place in the list of sizes."""
        if num_bytes <= 0:
            return None, []
        first = self._object(0)
        data = self.heap.allocate(num_bytes)
        return data, [first, *map(self._object, range(1, len(_BESIDE)))]

    def free(self, tensor: tuple[Block | None, list[tuple[int, Block]]]) -> None:
        """Give the data back, and as many objects as there are too many of."""
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


def resident_peak_bytes(trace: Trace) -> int:
    """What malloc keeps resident at most for a training whose steady step this is."""
    tensors = TensorHeap()
    replay(trace, tensors)
    least = trace.peak_bytes()
    passes = sum(span.phase == "forward" for span in trace.spans)
    turnover = sum(one.num_bytes for one in trace.allocations if one.born > 0) / max(1, passes * least)
    return least + round(max(0, tensors.heap.peak_bytes - least) * math.sqrt(turnover / _TURNOVER))
