"""``Pages``: resident memory under tcmalloc for a sequence of allocations and frees.

Source: src/common.h and src/page_heap.cc of gperftools: ``PageHeap::New`` (best fit among free runs of pages, the
lowest of equals), ``GrowHeap`` (by 1 MiB at least), ``Delete`` (merging). What is freed stays resident: it is given
back to the system too slowly to count.
"""

from __future__ import annotations

from ...measure.profiling.allocations import Trace
from ...units import MIB
from .free_list import Block, FreeBlocks, replay, round_up

_PAGE = 8192
_LARGE = 256 * 1024
"""kMaxSize: allocations up to this size come from spans of one size class each."""
_GROWTH = MIB
"""kMinSystemAlloc."""
_SMALL = -1
"""Marks an address within such a span."""


class Pages:
    """The page heap, and small objects beside it."""

    def __init__(self) -> None:
        self._free = FreeBlocks()
        self._last: Block | None = None
        self._end = self._small = self._most_small = 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes resident so far."""
        return self._end + self._most_small

    def allocate(self, num_bytes: int) -> Block | None:
        """Allocate a run of pages, or a small object; None for nothing."""
        if num_bytes <= 0:
            return None
        if num_bytes <= _LARGE:
            self._small += num_bytes
            self._most_small = max(self._most_small, self._small)
            return Block(_SMALL, num_bytes)
        wanted = round_up(num_bytes, _PAGE)
        block = self._free.best_fit(wanted) or self._grow(wanted)
        if block.num_bytes > wanted:
            rest = self._free.split(block, wanted)
            if self._last is block:
                self._last = rest
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back."""
        if block is None:
            return
        if block.address == _SMALL:
            self._small -= block.num_bytes
            return
        block = self._free.merge(block)
        if block.after is None:
            self._last = block
        self._free.keep(block)

    def _grow(self, wanted: int) -> Block:
        """Ask the system for pages. A free run at the end is merged with them only afterwards, so that it does not
        shorten what is asked for."""
        block = Block(self._end, max(wanted, _GROWTH), self._last)
        if self._last is not None:
            self._last.after = block
        self._end += block.num_bytes
        self._last = self._free.merge(block)
        return self._last


def resident_peak_bytes(trace: Trace) -> int:
    """Most bytes that tcmalloc keeps resident for a training with this steady step."""
    pages = Pages()
    replay(trace, pages)
    return pages.peak_bytes
