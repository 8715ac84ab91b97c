"""``Cut``: a sampler's indices as the micro-batches of optimizer steps, and where each of them stands."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler

from .positions import Position
from .techniques.batch import Batch

__all__ = ["Counted", "Cut", "Pieces", "advanced"]


class Cut(Sampler[list[int]]):
    """Cuts each effective batch of a sampler into micro-batches."""

    def __init__(self, sampler: Any, batch: Batch, drop_last: bool) -> None:
        self._sampler, self._batch, self._drop_last = sampler, batch, drop_last
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
        micro = self._batch.micro
        for start in range(0, len(step), micro):
            piece = step[start : start + micro]
            yield piece, Position(len(piece), start + micro >= len(step), place=next(place))

    def __len__(self) -> int:
        whole, tail = divmod(len(self._sampler), self._batch.num_samples)
        return whole * self._batch.accumulate + (0 if self._drop_last else -(-tail // self._batch.micro))


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
