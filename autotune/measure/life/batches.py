"""The batches of an evaluation, as its loader hands them out: how many there are, and an end before the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..measurement import Growth
from .growth import Pile

_FEWEST = 8
"""Batches that tell what piles up."""
_ENOUGH_BYTES = 32 * 2**20
"""That tell what is done with it at the end."""
PATIENCE = 4
"""Times its time that an evaluation has for as much."""


class Batches:
    """Of one evaluation: those of the loaders that it iterates over; without one, its calls of the model."""

    def __init__(self, pile: Pile, taken: Callable[[], Callable[[], int]]) -> None:
        """
        Args:
            pile: is told of each.
            taken: tells from when it is called what more was taken at most.
        """
        self._pile, self._taken = pile, taken
        self._at_end: Callable[[], int] | None = None
        self._usual = 0
        """What one more batch took, once the allocator had given back what it kept."""
        self.is_cut = False
        """Whether loaders have ended early."""
        self._lengths: dict[int, int | None] = {}
        """Batches of each loader's iteration, by its place."""
        self._iterators: list[Any] = []

    @property
    def tell(self) -> bool:
        """Whether so many have been that it shows whether something piles up."""
        return self._pile.num_batches >= _FEWEST

    @property
    def may_be_cut(self) -> bool:
        """Whether a loader hands them out that can end early, since something piles up."""
        return bool(self._iterators) and self._at_end is None and self._pile.law() is not None

    @property
    def is_ending(self) -> bool:
        """Whether they do, or are about to."""
        return self._at_end is not None or self.may_be_cut

    def ends(self, had: float) -> bool:
        """Whether no more batches are handed out, asked as each begins: one more, to tell what is usual, and then none.

        Args:
            had: the share of its time that the evaluation has had; beyond, it goes on for a while where too little has
                piled up to tell what is done with it at the end.
        """
        if self._at_end is not None and not self.is_cut:
            self._usual, self._at_end, self.is_cut = self._at_end(), self._taken(), True
        elif had > 1 and self.may_be_cut and (self._pile.bytes >= _ENOUGH_BYTES or had > PATIENCE):
            self._at_end = self._taken()
        return self.is_cut

    def called(self) -> None:
        """The model is called: a batch begins, unless loaders tell."""
        if not self._iterators:
            self._pile.add()

    @contextmanager
    def watched(self, had: Callable[[], float]) -> Iterator[None]:
        """Be told of what loaders hand out.

        Args:
            had: the share of its time that the evaluation has had: loaders end then, if something piles up.
        """
        original = _BaseDataLoaderIter.__next__

        def __next__(iterator: Any) -> Any:
            if self.ends(had()):
                raise StopIteration
            self.drawn(iterator)
            return original(iterator)

        _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            _BaseDataLoaderIter.__next__ = original  # type: ignore[method-assign]
            self._iterators.clear()

    def drawn(self, iterator: Any) -> None:
        """A batch is asked of a loader's iterator."""
        if all(iterator is not one for one in self._iterators):
            self._lengths[len(self._iterators)] = None
            with suppress(TypeError, NotImplementedError):  # a stream does not say
                self._lengths[len(self._iterators)] = len(iterator)
            self._iterators.append(iterator)
        self._pile.add()

    def found(self, is_ended: bool = True) -> Growth | None:
        """What piles up in all of them.

        Args:
            is_ended: whether the evaluation came to its end, of all batches or of fewer.
        """
        known = [length for length in self._lengths.values() if length is not None]
        all_batches = sum(known) if known and len(known) == len(self._lengths) else None
        at_end = self._at_end() if is_ended and self._at_end is not None and self.is_cut else 0
        return self._pile.found(all_batches, at_end, self._usual)
