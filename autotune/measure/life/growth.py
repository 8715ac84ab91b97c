"""Memory that piles up from one batch of an evaluation to the next: seen from a few batches, extended to all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..measurement import Growth
from ..timing.interval import student

FEWEST_SAMPLES = 9
"""That tell a growth of pages, which an allocator takes and gives back."""
_SPAN = 29
"""Steps that they span."""
_FIRST = 2
"""Batches that are left out: in them, libraries make what they keep."""
_MOST_SAMPLES = 64
"""Beyond these, every second one is left out."""
_UNSURE_BYTES = 8 * 2**20
"""By which what is taken at the end of an evaluation is uncertain, whatever has piled up."""


def growth(
    samples: Sequence[tuple[int, int]], smallest: float, fewest: int = FEWEST_SAMPLES, span: int = _SPAN
) -> float | None:
    """Bytes gained by a step, if memory grows without end.

    It does if the last third of the samples lies wholly above the first, and the rise from the second third to the last
    is at least half of that from the first to the second. A cache that fills, or an allocator that settles, slows down.

    Args:
        samples: (optimizer step, bytes), in order.
        smallest: bytes a step that count as growth.
        fewest: samples that tell.
        span: steps that they have to lie apart.

    Returns:
        None where it is stable, or there are too few samples, or they span too few steps.
    """
    if len(samples) < fewest or samples[-1][0] - samples[0][0] < span:
        return None
    third = len(samples) // 3
    first, last = samples[:third], samples[-third:]
    (x1, y1), (x2, y2), (x3, y3) = (_middle(part) for part in (first, samples[third:-third], last))
    early, late = (y2 - y1) / (x2 - x1), (y3 - y2) / (x3 - x2)
    rises = min(y for _, y in last) > max(y for _, y in first)
    slope = (y3 - y1) / (x3 - x1)
    return slope if rises and early > 0 and late >= early / 2 and slope >= smallest else None


def _middle(samples: Sequence[tuple[int, int]]) -> tuple[float, float]:
    return statistics.median(x for x, _ in samples), statistics.median(y for _, y in samples)


class Witness(NamedTuple):
    """Where the memory in use is read, and how much of it is evidence."""

    read: Callable[[], int | None]
    """Bytes in use now; None where nothing tells."""
    smallest: int
    """Bytes a batch below which growth is noise."""
    fewest: int
    """Samples that tell growth from noise."""


class Law(NamedTuple):
    """Bytes that a batch adds, with a 95 % interval."""

    value: float
    low: float
    high: float


def law(samples: Sequence[tuple[int, int]], smallest: int, fewest: int) -> Law | None:
    """A straight line through what was in use after each batch; None where it does not grow.

    The first batches are left out, and what grows has to grow in the first, the second and the last third of the
    others: an allocator that warms up, or a cache that fills, does not.

    Args:
        samples: (batches so far, bytes), in order.
        smallest: bytes a batch that count as growth.
        fewest: samples that tell, beside those that are left out.
    """
    settled = [sample for sample in samples if sample[0] > _FIRST]
    if growth(settled, smallest, fewest, span=fewest - 1) is None:
        return None
    xs, ys = zip(*settled, strict=True)
    slope, intercept = statistics.linear_regression(xs, ys)
    freedom = len(xs) - 2
    scatter = math.sqrt(sum((y - intercept - slope * x) ** 2 for x, y in settled) / freedom)
    middle = statistics.fmean(xs)
    half = student(freedom) * scatter / math.sqrt(sum((x - middle) ** 2 for x in xs))
    return Law(slope, slope - half, slope + half) if slope - half > smallest else None


class Pile:
    """What is in use as each batch of an evaluation begins, and the most that was."""

    def __init__(self, witness: Witness, high_bytes: Callable[[], int]) -> None:
        """
        Args:
            witness: tells what is in use.
            high_bytes: the most that the process was charged since the evaluation began.
        """
        self.num_batches = 0
        """Batches that have begun."""
        self._witness, self._high_bytes = witness, high_bytes
        self._samples: list[tuple[int, int]] = []
        self._high: list[tuple[int, int]] = []
        self._every = 1

    def add(self) -> None:
        """A batch begins."""
        self.num_batches += 1
        live = self._witness.read() if self.num_batches % self._every == 0 else None
        if live is None:
            return
        self._samples.append((self.num_batches, live))
        self._high.append((self.num_batches, self._high_bytes()))
        if len(self._samples) > _MOST_SAMPLES:
            self._every *= 2
            self._samples = [sample for sample in self._samples if sample[0] % self._every == 0]
            self._high = [sample for sample in self._high if sample[0] % self._every == 0]

    def law(self) -> Law | None:
        """What a batch adds; None where nothing piles up."""
        return law(self._samples, self._witness.smallest, self._witness.fewest)

    @property
    def bytes(self) -> float:
        """What has piled up."""
        live = self.law()
        return 0.0 if live is None else live.value * self.num_batches

    def found(self, all_batches: int | None, at_end: int = 0, usual: int = 0) -> Growth | None:
        """What piles up, and what it comes to.

        What is in use may grow by less than the most that is charged: where outputs are joined anew with each batch,
        both copies are there for a moment. What is taken once the last batch is done, to join what has piled up, grows
        with it too.

        Args:
            all_batches: that the evaluation has; None is not known.
            at_end: what it took from its last batch to its end, if it was let go on to that without more batches. To
                join what has piled up takes it once or several times.
            usual: what the last batch took, from its begin.
        """
        live = self.law()
        if live is None:
            return None
        tops = law(self._high, self._witness.smallest, self._witness.fewest) or live
        piled = live.value * self.num_batches
        anew = 1 + round(usual / piled)
        per_batch = max(Law(*(anew * value for value in live)), tops)
        seen, left = self._high[-1][1], (all_batches or 0) - self.num_batches
        whole = None
        if all_batches is not None and left > 0:
            once, all_piled = max(at_end - usual, 0) / piled, live.value * all_batches
            joins, unsure = round(once), _UNSURE_BYTES / piled
            whole = Law(
                seen + per_batch.value * left + joins * all_piled,
                seen + min(live.low, tops.low) * left + max(once - unsure, 0) * all_piled,
                seen + max(per_batch.high, tops.high) * left + (once + unsure) * all_piled,
            )
            whole = Law(whole.value, min(whole.low, whole.value), max(whole.high, whole.value))
        return Growth(
            bytes_per_batch=per_batch.value,
            num_batches=self.num_batches,
            all_batches=all_batches,
            seen_bytes=seen,
            whole_bytes=None if whole is None else round(whole.value),
            low_bytes=None if whole is None else round(whole.low),
            high_bytes=None if whole is None else round(whole.high),
        )
