"""The longest batch of a script that makes its batches by tokens: put in once all is timed, for the
batch that is drawn next, so that the peak has it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...ranks import world_size
from ...techniques.support.facts import Lengths
from ...workers.request import MeasureRequest


class LongestBatch:
    """As many of the longest samples as a batch has room for, drawn once by a loader that trains."""

    def __init__(self, lengths: Lengths, tokens: int) -> None:
        """
        Args:
            lengths: of the samples; their longest counts as the script's flag counts it.
            tokens: of a batch, at most.
        """
        self.how = lengths.how
        """How it was found."""
        self._places = lengths.batches(max(1, tokens // max(1, lengths.longest)))[-1]
        self._iterator: Any = None
        self._num_left = 0
        """Batches that the loader gives up to this one, those that its workers have begun included."""
        self.is_over = False
        """Whether it was drawn, and one more: some read a batch ahead."""

    @property
    def is_awaited(self) -> bool:
        """Whether it was put in, and is not over."""
        return self._iterator is not None and not self.is_over

    def put_into(self, iterator: Any, loader: Any) -> None:
        """What a loader's iterator draws next, after what its workers have begun; a stream has no samples by number."""
        if not isinstance(iterator, _BaseDataLoaderIter) or isinstance(loader.dataset, IterableDataset):
            return
        if loader.batch_sampler is None:
            return
        self._iterator = iterator
        self._num_left = 1 + loader.num_workers * (loader.prefetch_factor or 0)
        iterator._sampler_iter = self._in_place(iterator._sampler_iter)

    def _in_place(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The longest for the next of them, so that an epoch has as many; none where there is no more."""
        for _ in islice(batches, 1):
            yield self._places
        yield from batches

    def drawn(self, iterator: Any) -> None:
        """A batch came."""
        if self.is_awaited and iterator is self._iterator:
            self._num_left -= 1
            self.is_over = self._num_left < 0


def longest_batch(request: MeasureRequest) -> LongestBatch | None:
    """Of a plan whose batches a script makes by tokens, in one process; None of any other, or without lengths."""
    batch, lengths = request.plan.settings.batch, request.options.lengths
    if batch is None or batch.flag is None or batch.tokens is None or lengths is None or world_size() > 1:
        return None
    return LongestBatch(lengths, batch.tokens)
