"""``TokenCut``: optimizer steps in micro-batches of at most so many tokens, padding counted; packed, without any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ..ranks import ALONE, Ranks
from ..techniques.batch import Batch
from .cut import Cut
from .positions import Position

_MICRO_BATCHES_IN_TOKENS = 16
"""Starting so many micro-batches is taken to cost as much as computing one that has all the tokens."""


class TokenCut(Cut):
    """Cuts each effective batch of a sampler by length: an optimizer step sees the samples that it would see otherwise,
    the longest of them first.

    Of several ranks all have as many micro-batches in a step; samples that are too few for that are left out.
    """

    def __init__(
        self, sampler: Any, batch: Batch, drop_last: bool, lengths: Sequence[int], ranks: Ranks = ALONE
    ) -> None:
        """
        Args:
            sampler: of the same indices in every rank.
            batch: of all ranks together, with its ``tokens``.
            drop_last: leave a tail out.
            lengths: of every sample, by index.
            ranks: which of them this is.
        """
        super().__init__(sampler, batch, drop_last, ranks)
        assert batch.tokens is not None, "the caller sees to it"
        self._tokens, self._lengths, self._packed = batch.tokens, lengths, batch.packed

    def _cut(self, step: list[int], place: Iterator[int]) -> Iterator[tuple[list[int], Position]]:
        rank, size, _ = self._ranks
        groups = (packed if self._packed else grouped)(step, self._lengths, self._tokens)
        groups = even_groups(groups, self._lengths, self._tokens, size, self._packed)
        seen, mine = sum(map(len, groups)), groups[rank::size]
        for number, group in enumerate(mine, 1):
            yield group, Position(len(group), number == len(mine), place=next(place), step_samples=seen)

    def __len__(self) -> int:
        raise TypeError(
            "how many batches of so many tokens an epoch has depends on its order; it has "
            f"{-(-len(self._sampler) // self._num_samples)} optimizer steps"
        )


def grouped(samples: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The samples, longest first, cut where least is computed: a group takes its longest sample times its number, which
    is at most so many tokens, and a sixteenth of these for being one more. A sample that is longer by itself is a group
    of its own."""
    ranked = sorted(samples, key=lambda sample: -lengths[sample])  # stable: equal lengths stay in their order
    own = tokens / _MICRO_BATCHES_IN_TOKENS
    least, starts = [0.0], [0]
    """Of the first so many: what they take, and where their last group starts."""
    for stop in range(1, len(ranked) + 1):
        found: list[tuple[float, int]] = []
        for start in reversed(range(stop)):
            size = max(1, lengths[ranked[start]]) * (stop - start)
            if size > tokens and found:
                break
            found.append((least[start] + size + own, start))
        taken, start = min(found)
        least.append(taken)
        starts.append(start)
    groups, stop = [], len(ranked)
    while stop:
        groups.append(ranked[starts[stop] : stop])
        stop = starts[stop]
    return groups[::-1]


def packed(samples: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The samples in few rows of at most so many tokens, a longer one by itself: each, longest first, in the first row
    that has room.

    Source: Dósa 2007, The tight bound of first fit decreasing: at most 11/9 of the fewest rows, and 6/9 of a row.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda sample: -lengths[sample]):
        number = next((number for number, left in enumerate(room) if lengths[sample] <= left), len(groups))
        if number == len(groups):
            groups.append([])
            room.append(tokens)
        groups[number].append(sample)
        room[number] -= lengths[sample]
    return groups


def even_groups(
    groups: list[list[int]], lengths: Sequence[int], tokens: int, size: int, is_packed: bool = False
) -> list[list[int]]:
    """A multiple of ``size`` groups: those with most samples are halved. Where samples are too few for that, groups are
    joined as far as they are of at most so many tokens, and what is left over then is left out."""
    groups = list(groups)
    if sum(map(len, groups)) >= len(groups) + -len(groups) % size:
        while len(groups) % size:
            most = max(range(len(groups)), key=lambda number: len(groups[number]))
            half = -(-len(groups[most]) // 2)
            groups[most : most + 1] = [groups[most][:half], groups[most][half:]]
        return groups
    while len(groups) % size:
        joined = [left + right for left, right in pairwise(groups)]
        takes = [_taken(group, lengths, is_packed) for group in joined]
        if not takes or min(takes) > tokens:
            return groups[: len(groups) // size * size]
        least = takes.index(min(takes))
        groups[least : least + 2] = [joined[least]]
    return groups


def _taken(group: Sequence[int], lengths: Sequence[int], is_packed: bool) -> int:
    """Tokens of a group, the longest of which is first."""
    return sum(lengths[sample] for sample in group) if is_packed else lengths[group[0]] * len(group)


def extremes(lengths: Sequence[int], batch: Batch) -> list[list[int]]:
    """No micro-batch of a :class:`TokenCut` takes more memory than these, whatever the order of samples: the largest by
    samples, by tokens, and by tokens times length, the longest first. Each is made of samples that follow each other
    by length. A step that cuts them apart takes less.

    Memory that grows with each of these, as that of layers and of attention does, is largest at one of them or close to
    it.

    Packed, it is the row of most tokens, of few long samples and of many short ones. These have at least as many tokens
    as any row; by so much more, less than a sample, as none fits exactly.
    """
    assert batch.tokens is not None, "the caller sees to it"
    ranked = sorted(range(len(lengths)), key=lambda sample: lengths[sample])
    if batch.packed:
        found_rows = [_full(order, lengths, batch) for order in (ranked[::-1], ranked)]
        return found_rows if sorted(found_rows[0]) != sorted(found_rows[1]) else found_rows[:1]
    found: dict[str, tuple[int, int, int]] = {}
    for last, sample in enumerate(ranked, 1):
        length = lengths[sample]
        num = min(max(1, batch.tokens // max(1, length)), batch.num_samples, last)
        sizes = {"squares": num * length * length, "tokens": num * length, "samples": num}
        for name, size in sizes.items():
            if size >= found.get(name, (0, 0, 0))[0]:  # of equal ones the longer
                found[name] = size, last, num
    groups = [ranked[last - num : last][::-1] for _, last, num in (found[name] for name in found)]
    return [group for number, group in enumerate(groups) if group not in groups[:number]]


def _full(ranked: Sequence[int], lengths: Sequence[int], batch: Batch) -> list[int]:
    """The first samples that fill a row, as far as an optimizer step has so many; the last of them is the shortest that
    does. A sample that is longer than a row fills it alone."""
    assert batch.tokens is not None, "the caller sees to it"
    row: list[int] = []
    left = batch.tokens
    for sample in ranked[: batch.num_samples]:
        if row and lengths[sample] >= left:
            taken = set(row)
            others = (one for one in ranked if lengths[one] >= left and one not in taken)
            return [*row, min(others, key=lambda one: lengths[one])]
        row.append(sample)
        left -= lengths[sample]
        if left <= 0:
            break
    return row
