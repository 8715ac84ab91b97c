"""``TokenCut``: optimizer steps in micro-batches of at most so many tokens, padding counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..ranks import ALONE, Ranks
from ..techniques.batch import Batch
from .cut import Cut
from .positions import Position


class TokenCut(Cut):
    """Cuts each effective batch of a sampler by length: an optimizer step sees the samples that it would see otherwise,
    the longest of them first.

    Of several ranks all have as many micro-batches in a step; samples that are fewer than the ranks are left out.
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
        self._tokens, self._lengths = batch.tokens, lengths

    def _cut(self, step: list[int], place: Iterator[int]) -> Iterator[tuple[list[int], Position]]:
        rank, size, _ = self._ranks
        groups = even_groups(grouped(step, self._lengths, self._tokens), size)
        seen, mine = sum(map(len, groups)), groups[rank::size]
        for number, group in enumerate(mine, 1):
            yield group, Position(len(group), number == len(mine), place=next(place), step_samples=seen)

    def __len__(self) -> int:
        raise TypeError(
            "how many batches of so many tokens an epoch has depends on its order; it has "
            f"{-(-len(self._sampler) // self._num_samples)} optimizer steps"
        )


def grouped(samples: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The samples, longest first, in the fewest groups of at most so many tokens: the longest of a group times its
    number. A sample that is longer by itself is a group of its own."""
    ranked = sorted(samples, key=lambda sample: -lengths[sample])  # stable: equal lengths stay in their order
    groups, start = [], 0
    while start < len(ranked):
        stop = start + max(1, tokens // max(1, lengths[ranked[start]]))
        groups.append(ranked[start:stop])
        start = stop
    return groups


def even_groups(groups: list[list[int]], size: int) -> list[list[int]]:
    """A multiple of ``size`` groups: those with most samples are halved; none where samples are fewer."""
    groups = list(groups)
    while len(groups) % size:
        most = max(range(len(groups)), key=lambda number: len(groups[number]))
        group = groups[most]
        if len(group) == 1:
            return groups[: len(groups) // size * size]
        half = -(-len(group) // 2)
        groups[most : most + 1] = [group[:half], group[half:]]
    return groups


def extremes(lengths: Sequence[int], batch: Batch) -> list[list[int]]:
    """The micro-batches of a :class:`TokenCut` that may take most memory, whatever the order of samples: the largest by
    samples, by tokens, and by tokens times length, the longest first.

    Memory that grows with each of these, as that of layers and of attention does, is largest at one of them or close to
    it.
    """
    assert batch.tokens is not None, "the caller sees to it"
    ranked = sorted(range(len(lengths)), key=lambda sample: lengths[sample])
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
