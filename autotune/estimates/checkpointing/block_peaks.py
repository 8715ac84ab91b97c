"""The peak of a step as a linear function of which blocks are recomputed, from two traces: none recomputed, and all.

Both traces are cut into stretches: runs of allocations made by one block, or by none. What a block saves by being
recomputed is absent from its forward until its backward, whatever the other blocks do. So the most bytes alive in each
stretch are linear in the choice, and the peak is the largest of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from torch import nn

from ...measure.profiling.allocations import Allocation, Phase, Trace

Holders = Mapping[str, tuple[int, ...]]
"""Numbers of the blocks that a module stands in, by its name; modules outside all blocks are left out."""


@dataclass(frozen=True)
class StretchPeak:
    """The most bytes alive in one stretch, as a linear function of the choice."""

    base_bytes: int
    """Where no block is recomputed."""
    change_bytes: tuple[int, ...]
    """What recomputing each block adds; negative where it saves. The changes add up."""

    def at(self, blocks: Sequence[int]) -> int:
        """The peak where these blocks are recomputed."""
        return self.base_bytes + sum(self.change_bytes[number] for number in blocks)


@dataclass(frozen=True)
class _Stretch:
    phase: Phase
    block: int | None
    start: int
    """The moment before its first allocation."""

    @property
    def key(self) -> tuple[Phase, int | None]:
        return self.phase, self.block


def modules_holders(model: nn.Module, blocks: Sequence[nn.Module]) -> Holders:
    """For each module, the blocks that it belongs to; several for a shared module."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, tuple[int, ...]] = {}
    for number, block in enumerate(blocks):
        for module in block.modules():
            found[names[module]] = (*found.get(names[module], ()), number)
    return found


def holders_of(module: str, holders: Holders) -> tuple[int, ...]:
    """The blocks that a module belongs to, modules that a technique wrapped included; none for one outside."""
    while module not in holders and "." in module:
        module = module.rpartition(".")[0]
    return holders.get(module, ())


def stretch_peaks(stock: Trace, recomputed: Trace, holders: Holders, num_blocks: int) -> list[StretchPeak]:
    """The most bytes alive in each stretch of a step.

    Args:
        stock: the step where nothing is recomputed.
        recomputed: the same step where every block is.
        holders: by :func:`modules_holders`.
        num_blocks: that there are.
    """
    owners, others = _owners(stock, holders), _owners(recomputed, holders)
    pairs = list(_matched(_stretches(stock, owners), _stretches(recomputed, others)))
    starts, other_starts = ([stretch.start for stretch in side] for side in zip(*pairs, strict=True))
    less = _made(stock, owners, starts, num_blocks) - _made(recomputed, others, other_starts, num_blocks)
    freed = _freed([stretch for stretch, _ in pairs], np.diff(less, axis=1, append=0))
    peaks = zip(_most(stock, starts), _most(recomputed, other_starts), strict=True)
    found = []
    for at, ((stretch, _), (most, most_recomputed)) in enumerate(zip(pairs, peaks, strict=True)):
        change = -freed[at]
        if stretch.block is not None:
            change[stretch.block] = most_recomputed - most + freed[at].sum() - freed[at, stretch.block]
        found.append(StretchPeak(most, tuple(map(int, change))))
    return found


def _freed(stretches: Sequence[_Stretch], changes: np.ndarray) -> np.ndarray:
    """Bytes that recomputing each block has saved so far at the start of each stretch; one row for each stretch.

    A recomputed block keeps its input in forward, made by another block: that is counted against it until its backward
    frees it. All else counts for the block that made it, since a ReLU may keep a block's output for longer.

    Args:
        stretches: in order.
        changes: in each, by how many bytes the stock step gets ahead of the recomputed, by block that made them; the
            last row is of those that none made.
    """
    num_blocks = len(changes) - 1
    accounts = np.zeros((num_blocks, num_blocks + 1), np.int64)  # of each block, by who made the bytes
    own = np.arange(num_blocks)
    found = np.zeros((len(stretches), num_blocks), np.int64)
    for at, stretch in enumerate(stretches):
        found[at] = accounts.sum(axis=1)
        change, block = changes[:, at].copy(), stretch.block
        if block is not None:
            returned = change if stretch.phase == Phase.FORWARD else np.clip(change, 0, np.maximum(-accounts[block], 0))
            returned[num_blocks] = change[num_blocks]
            accounts[block] += returned
            change = change - returned
        accounts[own, own] += change[:num_blocks]
    return found


def _owners(trace: Trace, holders: Holders) -> list[int | None]:
    """The block that makes each allocation; None where none does."""
    found: list[int | None] = []
    current = -1
    for one in trace.allocations:
        numbers = holders_of(one.module, holders) if _is_in_pass(one) else ()
        if numbers and current not in numbers:
            current = _next(numbers, current, one.phase)
        found.append(current if numbers else None)
    return found


def _is_in_pass(one: Allocation) -> bool:
    return one.phase in (Phase.FORWARD, Phase.BACKWARD)


def _next(numbers: tuple[int, ...], current: int, phase: Phase) -> int:
    """Which of several blocks is at work in a module that they share: the next, backward running from the last."""
    if phase == Phase.BACKWARD:
        return max((number for number in numbers if number < current), default=max(numbers))
    return min((number for number in numbers if number > current), default=min(numbers))


def _stretches(trace: Trace, owners: Sequence[int | None]) -> list[_Stretch]:
    found: list[_Stretch] = [_Stretch(Phase.BEFORE, None, 0)]
    for one, block in zip(trace.allocations, owners, strict=True):
        if one.born > 0 and (one.phase, block) != found[-1].key:
            found.append(_Stretch(one.phase, block, one.born - 1))
    return found


def _matched(stock: Sequence[_Stretch], recomputed: Sequence[_Stretch]) -> Iterator[tuple[_Stretch, _Stretch]]:
    """Stretches that both traces have, in order. A stretch in one trace alone counts to the one before it."""
    keys, others = ([stretch.key for stretch in side] for side in (stock, recomputed))
    for match in SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks():
        for offset in range(match.size):
            yield stock[match.a + offset], recomputed[match.b + offset]


def _made(trace: Trace, owners: Sequence[int | None], starts: Sequence[int], num_blocks: int) -> np.ndarray:
    """Bytes alive at the start of each stretch, by the block that made them; the last row is for no block."""
    changes = np.zeros((num_blocks + 1, len(starts) + 1), np.int64)
    for one, block in zip(trace.allocations, owners, strict=True):
        row = num_blocks if block is None else block
        changes[row, bisect_left(starts, one.born)] += one.num_bytes
        if one.died is not None:
            changes[row, bisect_left(starts, one.died)] -= one.num_bytes
    made: np.ndarray = changes.cumsum(axis=1)[:, :-1]
    return made


def _most(trace: Trace, starts: Sequence[int]) -> list[int]:
    """Most bytes alive in each stretch."""
    live = trace.live_bytes()
    ends = [*starts[1:], len(live) - 1]
    return [max(live[start : end + 1]) for start, end in zip(starts, ends, strict=True)]
