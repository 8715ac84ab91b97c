"""The peak of a step as a linear function of what is done in each block, from the trace of the stock step, and of one
for each thing that may be done, in all blocks at once.

All traces are cut into stretches: runs of allocations made by one block, or by none. What a block saves by being
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


@dataclass(frozen=True, eq=False)
class StretchPeaks:
    """The most bytes alive in each stretch, as a linear function of the choice."""

    base_bytes: np.ndarray
    """(stretches,): where nothing is changed."""
    changes: np.ndarray
    """(other steps, stretches, blocks + 1): what doing as another step does adds, in each block and, last, outside
    them; negative where it saves. The changes add up."""
    whole: np.ndarray
    """(other steps, stretches): the same, everywhere at once."""


@dataclass(frozen=True)
class _Stretch:
    phase: Phase
    block: int | None
    start: int
    """The moment before its first allocation."""

    @property
    def key(self) -> tuple[Phase, int | None]:
        return self.phase, self.block


@dataclass(frozen=True)
class _Side:
    """A trace, cut."""

    trace: Trace
    owners: list[int | None]
    stretches: list[_Stretch]

    @classmethod
    def of(cls, trace: Trace, holders: Holders) -> _Side:
        owners = _owners(trace, holders)
        return cls(trace, owners, _stretches(trace, owners))

    def made(self, starts: Sequence[int], num_blocks: int) -> np.ndarray:
        """Bytes alive at the start of each stretch, by the block that made them; the last row is for no block."""
        changes = np.zeros((num_blocks + 1, len(starts) + 1), np.int64)
        for one, block in zip(self.trace.allocations, self.owners, strict=True):
            row = num_blocks if block is None else block
            changes[row, bisect_left(starts, one.born)] += one.num_bytes
            if one.died is not None:
                changes[row, bisect_left(starts, one.died)] -= one.num_bytes
        made: np.ndarray = changes.cumsum(axis=1)[:, :-1]
        return made


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


def stretch_peaks(stock: Trace, others: Sequence[Trace], holders: Holders, num_blocks: int) -> StretchPeaks:
    """The most bytes alive in each stretch of a step.

    Args:
        stock: the step where nothing is changed.
        others: the same step, where something else is done in every block and outside them.
        holders: by :func:`modules_holders`.
        num_blocks: that there are.
    """
    side = _Side.of(stock, holders)
    base = np.array(_most(stock, [stretch.start for stretch in side.stretches]))
    found = [_compared(side, _Side.of(other, holders), num_blocks) for other in others]
    shape = len(others), len(base), num_blocks + 1
    changes, whole = (np.array([one[part] for one in found]) for part in (0, 1))
    return StretchPeaks(base, changes.reshape(shape), whole.reshape(shape[:2]))


def _compared(stock: _Side, other: _Side, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(stretches, blocks + 1) and (stretches,): what the other step adds to the stock step's stretches. A stretch that
    only one of them has counts to the one before it, as one with it."""
    pairs = list(_matched(stock.stretches, other.stretches))
    kept = [stock.stretches[at] for at, _ in pairs]
    starts, others = [one.start for one in kept], [other.stretches[at].start for _, at in pairs]
    less = stock.made(starts, num_blocks) - other.made(others, num_blocks)
    freed = _freed(kept, np.diff(less, axis=1, append=0))
    whole = np.array(_most(other.trace, others)) - np.array(_most(stock.trace, starts))
    of_each = np.searchsorted([at for at, _ in pairs], np.arange(len(stock.stretches)), side="right") - 1
    return _changes(kept, freed, whole)[of_each], whole[of_each]


def _changes(stretches: Sequence[_Stretch], freed: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """What each adds to each stretch: in its own, what is left of the whole once all others are counted."""
    change = -freed
    for at, stretch in enumerate(stretches):
        own = change.shape[1] - 1 if stretch.block is None else stretch.block
        change[at, own] = whole[at] + freed[at].sum() - freed[at, own]
    return change


def _freed(stretches: Sequence[_Stretch], changes: np.ndarray) -> np.ndarray:
    """Bytes that another way in each block, and last outside all, has saved so far at the start of each stretch; one
    row for each stretch.

    A recomputed block keeps its input in forward, made by another block: that is counted against it until its backward
    frees it. All else counts for the block that made it, since a ReLU may keep a block's output for longer.

    Args:
        stretches: in order.
        changes: in each, by how many bytes the stock step gets ahead of the recomputed, by block that made them; the
            last row is of those that none made.
    """
    num_blocks = len(changes) - 1
    accounts = np.zeros((num_blocks + 1, num_blocks + 1), np.int64)  # of each block, by who made the bytes
    own = np.arange(num_blocks + 1)
    found = np.zeros((len(stretches), num_blocks + 1), np.int64)
    for at, stretch in enumerate(stretches):
        found[at] = accounts.sum(axis=1)
        change, block = changes[:, at].copy(), stretch.block
        if block is not None:
            returned = change if stretch.phase == Phase.FORWARD else np.clip(change, 0, np.maximum(-accounts[block], 0))
            returned[num_blocks] = change[num_blocks]
            accounts[block] += returned
            change = change - returned
        accounts[own, own] += change
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


def _matched(stock: Sequence[_Stretch], other: Sequence[_Stretch]) -> Iterator[tuple[int, int]]:
    """Numbers of stretches that both traces have, in order."""
    keys, others = ([stretch.key for stretch in side] for side in (stock, other))
    for match in SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks():
        for offset in range(match.size):
            yield match.a + offset, match.b + offset


def _most(trace: Trace, starts: Sequence[int]) -> list[int]:
    """Most bytes alive in each stretch."""
    live = trace.live_bytes()
    ends = [*starts[1:], len(live) - 1]
    return [max(live[start : end + 1]) for start, end in zip(starts, ends, strict=True)]
