"""``Feed``: the micro-batches of a loader, epoch after epoch, and the time spent waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..data.loader import Loader
from ..data.positions import Position
from ..errors import TaskError
from ..nested import bytes_in
from .timing.moments import Gap, Gaps

_END = object()


def largest(batches: Iterable[Any]) -> Any:
    """The first of those batches whose tensors take most bytes."""
    return max(batches, key=bytes_in)


def repeated(
    loader: Loader, batch: Any, each: Callable[[Any], Any] = lambda batch: batch, num_samples: int | None = None
) -> Iterator[tuple[Any, Position]]:
    """The micro-batches of an optimizer step, each replaced by what ``each`` makes of this one; two of those that are
    cut by length. Batches that were waiting to be trained on are dropped.

    Args:
        loader: of the training.
        batch: on its device.
        each: makes of it what is trained on.
        num_samples: in it; None is as many as in every micro-batch.
    """
    loader.positions.clear()
    row = loader.batch
    times = row.accumulate if row.tokens is None else min(row.accumulate, 2)
    for number in range(1, times + 1):
        arrived, position = each(batch), Position(num_samples or row.micro, number == times)
        loader.positions.put(arrived, position)
        yield arrived, position


class Feed:
    """Iterates over a loader for ever.

    The start of an epoch is counted apart from waiting within it. It lasts from the call that finds an epoch exhausted
    (which ends its workers) to the next epoch's first batch. Moving a batch to the device is neither.
    """

    def __init__(self, loader: Loader) -> None:
        self.num_batches = 0
        """Micro-batches handed out."""
        self.waits = Gaps()
        """Waiting within epochs."""
        self.starts = Gaps()
        """Between epochs."""
        self._loader = loader
        self._epoch: Iterator[Any] | None = None
        self._first: Any = None
        self._first_start: Gap | None = None
        self._samples_seen = 0
        self._samples_counted: int | None = None

    def open(self) -> None:
        """Start the first epoch and its workers, before anything else makes the process larger from which they are
        forked.

        Raises:
            TaskError: the dataset or its sampler is empty.
        """
        self._first = self._start(self._gap())

    def next(self) -> tuple[Any, Position]:
        """The next micro-batch, on the device, and its position in the optimizer step.

        Raises:
            TaskError: the dataset or its sampler is empty.
        """
        batch = self._take()
        self.num_batches += 1
        position = self._loader.position
        assert position is not None, "a loader knows where each batch stands"
        self._samples_seen += position.num_samples * self._loader.ranks.size
        return batch, position

    def step(self) -> Iterator[tuple[Any, Position]]:
        """The micro-batches of the next optimizer step, as :meth:`next` gives them."""
        while True:
            batch, position = self.next()
            yield batch, position
            if position.ends_step:
                return

    def largest_of(self, num_batches: int) -> Any:
        """The largest of the next so many micro-batches, or of those that an epoch has."""
        return largest(self.next()[0] for _ in range(num_batches) if not self.has_restarted)

    def restart(self) -> None:
        """Leave the running epoch and start another, so that an epoch's start is measured."""
        self._epoch, self._samples_seen = None, 0
        self._first = self._start(self._gap())

    @property
    def has_restarted(self) -> bool:
        """Whether an epoch's start other than the first has been seen."""
        return self.starts.num > 1

    @property
    def epoch_start_s(self) -> float:
        """Mean seconds from asking for an epoch to its first batch, as far as the device did without; the first counts
        only while there is no other. Waits for the device."""
        first_s = self._first_start.seconds() if self._first_start is not None else 0.0
        total_s, num = self.starts.seconds(self.starts.num), self.starts.num
        return (total_s - first_s) / (num - 1) if num > 1 else first_s

    @property
    def epoch_samples(self) -> int | None:
        """Samples in one epoch: as counted, or as the loader says; None for a stream that has not ended yet."""
        return self._samples_counted or self._loader.num_samples

    def _take(self) -> Any:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._epoch is None:
            return self._start(self._gap())
        gap = self._gap()
        batch = self._next_of(self._epoch, gap)
        if batch is not _END:
            self.waits.add(gap)
            return batch
        self._samples_counted, self._samples_seen = self._samples_seen, 0
        return self._start(gap)

    def _gap(self) -> Gap:
        return Gap(self._loader.device)

    def _next_of(self, epoch: Iterator[Any], gap: Gap) -> Any:
        """A batch, or ``_END``; the gap ends where it is there."""
        self._loader.on_arrival = gap.end
        try:
            return next(epoch, _END)
        finally:
            self._loader.on_arrival = None

    def _start(self, gap: Gap) -> Any:
        """The first batch of an epoch, which was asked for as the gap began."""
        self._epoch = iter(self._loader)
        batch = self._next_of(self._epoch, gap)
        if batch is _END:
            raise TaskError(
                "an epoch has no batch: build_sampler returned a sampler without indices, or so few that drop_last "
                "drops them all."
            )
        self._first_start = self._first_start or gap
        self.starts.add(gap)
        return batch
