"""``Cut``: a sampler's indices as the micro-batches of optimizer steps, and where each of them stands."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler

from .positions import Position
from .randomness import Randomness
from .ranks import ALONE, Ranks
from .techniques.batch import Batch

__all__ = ["Alike", "Counted", "Cut", "Pieces", "advanced"]

_AT_ONCE = 1024
"""Indices that are drawn at a time: the state of everything random is exchanged around each."""


class Cut(Sampler[list[int]]):
    """Cuts each effective batch of a sampler into micro-batches, which several ranks take in turn.

    So every rank reads the same indices from the sampler. A tail that is too short for equal numbers of micro-batches
    is cut smaller; samples that are fewer than the ranks are left out.
    """

    def __init__(self, sampler: Any, batch: Batch, drop_last: bool, ranks: Ranks = ALONE) -> None:
        """
        Args:
            sampler: of the same indices in every rank.
            batch: of all ranks together.
            drop_last: leave a tail out.
            ranks: which of them this is.
        """
        self._sampler, self._batch, self._drop_last, self._ranks = sampler, batch, drop_last, ranks
        self.pieces = Pieces(iter(()))
        """The iteration that began last."""

    def __iter__(self) -> Pieces:
        self.pieces = Pieces(self._iterate())
        return self.pieces

    def _iterate(self) -> Iterator[tuple[list[int], Position]]:
        step: list[int] = []
        place = itertools.count()
        for index in self._sampler:
            step.append(index)
            if len(step) == self._batch.num_samples:
                yield from self._cut(step, place)
                step = []
        if step and not self._drop_last:
            yield from self._cut(step, place)

    def _cut(self, step: list[int], place: Iterator[int]) -> Iterator[tuple[list[int], Position]]:
        sizes = self._sizes(len(step))
        ends = list(itertools.accumulate(sizes))
        mine = range(self._ranks.rank, len(sizes), self._ranks.size)
        for number in mine:
            piece = step[ends[number] - sizes[number] : ends[number]]
            is_last = number == mine[-1]
            yield piece, Position(len(piece), is_last, place=next(place), step_samples=ends[-1])

    def _sizes(self, num_samples: int) -> list[int]:
        """Of a step's micro-batches, as many for each rank."""
        micro, size = self._batch.micro, self._ranks.size
        num = -(-num_samples // micro)
        if num % size == 0:
            return [min(micro, num_samples - start) for start in range(0, num_samples, micro)]
        num = min(-(-num // size), num_samples // size) * size
        if num == 0:
            return []
        small, rest = divmod(min(num_samples, num * micro), num)
        return [small + 1] * rest + [small] * (num - rest)

    def __len__(self) -> int:
        """Of this rank."""
        whole, tail = divmod(len(self._sampler), self._batch.num_samples)
        pieces = whole * len(self._sizes(self._batch.num_samples)) + (0 if self._drop_last else len(self._sizes(tail)))
        return pieces // self._ranks.size


class Alike(Sampler[int]):
    """A user's sampler that gives every rank the same indices, whatever else the ranks draw at random."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler, self._seed, self._epoch = sampler, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Another order for each, by the number alone; the user's own is told too."""
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
    """One iteration over a cut; it says where each piece stands as it is handed out."""

    def __init__(self, pieces: Iterator[tuple[list[int], Position]]) -> None:
        self._pieces = pieces
        self.places: deque[Position] = deque()
        """Of what was handed out: workers ask ahead."""

    def __next__(self) -> list[int]:
        piece, position = next(self._pieces)
        self.places.append(position)
        return piece

    def advance(self, num: int) -> None:
        """Leave so many pieces out, unread."""
        self._pieces = advanced(self._pieces, num)


class Counted:
    """Collates a stream's samples and counts them: each worker process may end in a short batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        """How many samples, and their batch."""
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
