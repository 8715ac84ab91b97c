"""The peak of a step as a linear function of which blocks are recomputed, from two traces of it: none, and all.

Both traces are cut into stretches: allocations of one block, or of none, that follow each other. What a block keeps
less of when it is recomputed is alive between its forward and its backward, whatever the other blocks do; within its
own stretches it goes one way or the other. So the most bytes alive in each stretch are linear in the choice, and the
peak is the largest of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from torch import nn

from ..measure.allocations import Allocation, Phase, Trace

__all__ = ["Holders", "StretchPeak", "holders_of", "modules_holders", "stretch_peaks"]

Holders = Mapping[str, tuple[int, ...]]
"""Numbers of the blocks that a module stands in, by its name; modules outside all blocks are left out."""


@dataclass(frozen=True)
class StretchPeak:
    """The most bytes alive in one stretch, whichever blocks are recomputed."""

    base_bytes: int
    """Where none is."""
    change_bytes: tuple[int, ...]
    """What recomputing each block changes; these add up."""

    def at(self, blocks: Sequence[int]) -> int:
        """Where these are recomputed."""
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
    """Which blocks each module stands in; a module that several share stands in each."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, tuple[int, ...]] = {}
    for number, block in enumerate(blocks):
        for module in block.modules():
            found[names[module]] = (*found.get(names[module], ()), number)
    return found


def holders_of(module: str, holders: Holders) -> tuple[int, ...]:
    """Blocks that a module stands in, one that a technique put there included; none for one outside."""
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
    """Bytes that recomputing each block has freed where each stretch starts, one row a stretch.

    Forward, a block that is recomputed keeps its input, made by another: that is on its account until its backward
    gives it back. All else is on the account of the block that made it: a ReLU may keep the block's output longer.

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
            returned = change if stretch.phase == "forward" else np.clip(change, 0, np.maximum(-accounts[block], 0))
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
    return one.phase in ("forward", "backward")


def _next(numbers: tuple[int, ...], current: int, phase: Phase) -> int:
    """Which of several blocks is at work in a module that they share: the next, backward running from the last."""
    if phase == "backward":
        return max((number for number in numbers if number < current), default=max(numbers))
    return min((number for number in numbers if number > current), default=min(numbers))


def _stretches(trace: Trace, owners: Sequence[int | None]) -> list[_Stretch]:
    found: list[_Stretch] = [_Stretch("before", None, 0)]
    for one, block in zip(trace.allocations, owners, strict=True):
        if one.born > 0 and (one.phase, block) != found[-1].key:
            found.append(_Stretch(one.phase, block, one.born - 1))
    return found


def _matched(stock: Sequence[_Stretch], recomputed: Sequence[_Stretch]) -> Iterator[tuple[_Stretch, _Stretch]]:
    """Stretches that both traces have, in order; one that a single trace has counts to that before it."""
    keys, others = ([stretch.key for stretch in side] for side in (stock, recomputed))
    for match in SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks():
        for offset in range(match.size):
            yield stock[match.a + offset], recomputed[match.b + offset]


def _made(trace: Trace, owners: Sequence[int | None], starts: Sequence[int], num_blocks: int) -> np.ndarray:
    """Bytes alive where each stretch starts, by the block that made them; in the last row by none."""
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
