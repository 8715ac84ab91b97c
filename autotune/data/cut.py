"""``Cut``: a sampler's indices as the micro-batches of optimizer steps, and where each of them stands."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from ..randomness import Randomness
from ..ranks import ALONE, Ranks
from ..techniques.batch import Batch
from .positions import Position

_AT_ONCE = 1024
"""Indices that are drawn at a time: around each draw the random state is saved and restored."""


class Cut(Sampler[list[int]]):
    """Cuts each effective batch of a sampler into micro-batches, which several ranks take in turn.

    So every rank reads the same indices from the sampler. A tail that is too short for equal numbers of micro-batches
    is cut smaller; samples that are fewer than the ranks are left out.

    Ranks of unequal shares take theirs one after the other, of a tail in proportion. Where all have as many
    micro-batches, which collectives in forward need, they have as many of the tail, or leave it out.
    """

    def __init__(self, sampler: Any, batch: Batch, drop_last: bool, ranks: Ranks = ALONE) -> None:
        """
        Args:
            sampler: of the same indices in every rank.
            batch: of all ranks together; not looked at where they have shares of their own.
            drop_last: leave a tail out.
            ranks: which of them this is.
        """
        self._sampler, self._batch, self._drop_last, self._ranks = sampler, batch, drop_last, ranks
        self._num_samples = ranks.num_samples or batch.num_samples
        self.pieces = Pieces(iter(()))
        """The newest iteration."""

    def __iter__(self) -> Pieces:
        self.pieces = Pieces(self._iterate())
        return self.pieces

    def _iterate(self) -> Iterator[tuple[list[int], Position]]:
        step: list[int] = []
        place = itertools.count()
        for index in self._sampler:
            step.append(index)
            if len(step) == self._num_samples:
                yield from self._cut(step, place)
                step = []
        if step and not self._drop_last:
            yield from self._cut(step, place)

    def _cut(self, step: list[int], place: Iterator[int]) -> Iterator[tuple[list[int], Position]]:
        sizes, mine = self._sizes(len(step))
        ends = list(itertools.accumulate(sizes))
        for number in mine:
            piece = step[ends[number] - sizes[number] : ends[number]]
            is_last = number == mine[-1]
            yield piece, Position(len(piece), is_last, place=next(place), step_samples=ends[-1])

    def _sizes(self, num_samples: int) -> tuple[list[int], range]:
        """Micro-batches of each step, and which of them are this rank's."""
        rank, size, shares = self._ranks
        if not shares:
            sizes = self._in_turn(num_samples)
            return sizes, range(rank, len(sizes), size)
        cut = _uneven(num_samples, shares)
        start = sum(map(len, cut[:rank]))
        return [*itertools.chain(*cut)], range(start, start + len(cut[rank]))

    def _in_turn(self, num_samples: int) -> list[int]:
        """Micro-batches of each step, the same number for each rank."""
        micro, size = self._batch.micro, self._ranks.size
        num = -(-num_samples // micro)
        if num % size == 0:
            return [min(micro, num_samples - start) for start in range(0, num_samples, micro)]
        num = min(-(-num // size), num_samples // size) * size
        if num == 0:
            return []
        return _split(min(num_samples, num * micro), num)

    def __len__(self) -> int:
        """Micro-batches in an epoch, of this rank."""
        whole, tail = divmod(len(self._sampler), self._num_samples)
        of_tail = 0 if self._drop_last else len(self._sizes(tail)[1])
        return whole * len(self._sizes(self._num_samples)[1]) + of_tail


def _uneven(num_samples: int, shares: Sequence[Batch]) -> list[list[int]]:
    """For each rank the sizes of its micro-batches; all are empty if the samples are too few."""
    counts = _proportional(num_samples, [share.num_samples for share in shares])
    nums = [-(-count // share.micro) for count, share in zip(counts, shares, strict=True)]
    if len({share.accumulate for share in shares}) == 1:
        nums = [max(nums)] * len(shares)
    if any(count < max(num, 1) for count, num in zip(counts, nums, strict=True)):
        return [[] for _ in shares]
    if num_samples == sum(share.num_samples for share in shares):
        return [share.sizes() for share in shares]
    return [_split(count, num) for count, num in zip(counts, nums, strict=True)]


def _proportional(total: int, shares: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the shares, at least 1 each if there are so many; they add up to the total."""
    whole = sum(shares)
    if total < len(shares):
        return [0] * len(shares)
    counts = [max(1, total * share // whole) for share in shares]
    while over := sum(counts) - total:
        sign = 1 if over > 0 else -1
        most = max(
            (number for number in range(len(shares)) if over < 0 or counts[number] > 1),
            key=lambda number: sign * (counts[number] * whole - total * shares[number]),
        )
        counts[most] -= sign
    return counts


def _split(total: int, num: int) -> list[int]:
    """Split a number into parts that differ by one at most, the larger first."""
    small, rest = divmod(total, num)
    return [small + 1] * rest + [small] * (num - rest)


class Alike(Sampler[int]):
    """Wraps a user's sampler so that every rank gets the same indices, whatever random numbers it draws elsewhere."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler, self._seed, self._epoch = sampler, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch's number, which alone decides the order; the user's own sampler is told too."""
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        shared = Randomness(self._seed + self._epoch)
        with shared:
            indices = iter(self._sampler)
        while True:
            with shared:
                some = list(itertools.islice(indices, _AT_ONCE))
            if not some:
                return
            yield from some

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def generator(self) -> Any:
        """The user's."""
        return getattr(self._sampler, "generator", None)


class Pieces(Iterator[list[int]]):
    """One iteration over a :class:`Cut`: yields pieces, and notes the place of each in its optimizer step."""

    def __init__(self, pieces: Iterator[tuple[list[int], Position]]) -> None:
        self._pieces = pieces
        self.places: deque[Position] = deque()
        """Of what was handed out: workers ask ahead."""

    def __next__(self) -> list[int]:
        piece, position = next(self._pieces)
        self.places.append(position)
        return piece

    def advance(self, num: int) -> None:
        """Skip so many pieces without reading their samples."""
        self._pieces = advanced(self._pieces, num)


class Counted:
    """Collates samples of an iterable dataset and counts them: the last batch of each worker may be short."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        """The number of samples, and their batch."""
        return len(samples), self._collate(samples)


def advanced(items: Iterator[Any], num: int) -> Iterator[Any]:
    """The items after the first ``num``, whose making has begun: what its first item draws at random is drawn.

    Raises:
        EOFError: there are not so many.
    """
    taken = sum(1 for _ in itertools.islice(items, num))
    if taken < num:
        raise EOFError(taken)
    return items if num else itertools.chain(list(itertools.islice(items, 1)), items)
