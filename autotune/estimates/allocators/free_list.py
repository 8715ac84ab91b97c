"""What the allocators' models share: blocks of memory, merged when free and found by size; and the replay of a
training."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ...measure.profiling.allocations import Allocation, Phase, Trace

_STEPS = 3
"""Optimizer steps replayed: one before the optimizer has state, and two after."""

B = TypeVar("B")


@dataclass(slots=True)
class Block:
    """A stretch of memory."""

    address: int
    num_bytes: int
    before: Block | None = None
    after: Block | None = None
    """Neighbours, free or not; None at an edge."""
    is_free: bool = False

    def key(self) -> tuple[int, int]:
        """Order of free blocks: the smallest first, then the lowest."""
        return self.num_bytes, self.address


class FreeBlocks:
    """Free blocks, in order of size."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._keys: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def best_fit(self, num_bytes: int) -> Block | None:
        """Take the smallest free block that is large enough."""
        at = bisect_left(self._keys, (num_bytes,))
        return self._take(at) if at < len(self._blocks) else None

    def take(self, block: Block) -> Block:
        """Remove a block from the free ones."""
        return self._take(bisect_left(self._keys, block.key()))

    def _take(self, at: int) -> Block:
        block = self._blocks.pop(at)
        del self._keys[at]
        block.is_free = False
        return block

    def split(self, block: Block, num_bytes: int) -> Block:
        """Cut a taken block in two, and return the rest, which is free."""
        rest = cut(block, num_bytes)
        self.keep(rest)
        return rest

    def merge(self, block: Block) -> Block:
        """Join a block, not yet kept, with its free neighbours, which are taken."""
        if block.before is not None and block.before.is_free:
            block = _merged(self.take(block.before), block)
        if block.after is not None and block.after.is_free:
            block = _merged(block, self.take(block.after))
        return block

    def keep(self, block: Block) -> None:
        """Add a block to the free ones."""
        block.is_free = True
        at = bisect_left(self._keys, block.key())
        self._keys.insert(at, block.key())
        self._blocks.insert(at, block)


def cut(block: Block, num_bytes: int) -> Block:
    """Cut a taken block in two, and return the rest, which is taken too."""
    rest = Block(block.address + num_bytes, block.num_bytes - num_bytes, block, block.after)
    if block.after is not None:
        block.after.before = rest
    block.num_bytes, block.after = num_bytes, rest
    return rest


def _merged(first: Block, second: Block) -> Block:
    first.num_bytes += second.num_bytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


class _Allocator(Protocol, Generic[B]):
    def allocate(self, num_bytes: int) -> B: ...

    def free(self, block: B) -> None: ...


def replay(trace: Trace, allocator: _Allocator[B]) -> None:
    """Replay a training through an allocator: its parameters, a first step, in which the optimizer's state is made, and
    two steady ones."""
    before = [one for one in trace.allocations if one.born == 0]
    late = [one for one in before if one.kind == "optimizer_state"]
    lasting = {one.id: allocator.allocate(one.num_bytes) for one in before if one.kind != "optimizer_state"}
    optimizer = next((span.start for span in trace.spans if span.phase == Phase.OPTIMIZER), trace.num_moments)
    events = list(_events(trace))
    blocks: dict[int, B] = {}

    def make_state() -> None:
        lasting.update({state.id: allocator.allocate(state.num_bytes) for state in late})
        late.clear()

    for _ in range(_STEPS):
        for moment, one, is_birth in events:
            if moment >= optimizer:
                make_state()
            if is_birth:
                blocks[one.id] = allocator.allocate(one.num_bytes)
            elif one.id in blocks:
                allocator.free(blocks.pop(one.id))
            elif one.id in lasting:
                allocator.free(lasting.pop(one.id))
        make_state()
        for one in trace.allocations:  # what outlives its step gives way to the next one's
            if one.died is None and one.id in blocks:
                allocator.free(blocks.pop(one.id))


def _events(trace: Trace) -> Iterator[tuple[int, Allocation, bool]]:
    """(moment, allocation, whether it is made), in order; at one moment, frees come first."""
    born = [(one.born, 1, one.id, one) for one in trace.allocations if one.born > 0]
    died = [(one.died, 0, one.id, one) for one in trace.allocations if one.died is not None]
    for moment, is_birth, _, one in sorted([*born, *died], key=lambda row: row[:3]):
        yield moment, one, bool(is_birth)


def round_up(number: int, step: int) -> int:
    """To a multiple of ``step``."""
    return -(-number // step) * step
