"""Leaks: memory that grows with each optimizer step and is never freed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from time import perf_counter

from ..memory import Charge
from ..steps import Steps

_NUM_STEPS = 30
_FEWEST_SAMPLES = 9
_SMALLEST_BYTES = {"cpu": 32 * 1024, "cuda": 4 * 1024}
"""Bytes a step below which growth is noise: resident memory comes in pages and arenas, CUDA's count is exact."""


def growth(samples: Sequence[tuple[int, int]], smallest: float) -> float | None:
    """Bytes gained by a step, if memory grows without end.

    It does if the last third of the samples lies wholly above the first, and the rise from the second third to the last
    is at least half of that from the first to the second. A cache that fills, or an allocator that settles, slows down.

    Args:
        samples: (optimizer step, bytes), in order.
        smallest: bytes a step that count as growth.

    Returns:
        None where it is stable, or the samples are fewer than 9 or span fewer than 30 steps.
    """
    if not _is_evidence(samples):
        return None
    third = len(samples) // 3
    first, last = samples[:third], samples[-third:]
    (x1, y1), (x2, y2), (x3, y3) = (_middle(part) for part in (first, samples[third:-third], last))
    early, late = (y2 - y1) / (x2 - x1), (y3 - y2) / (x3 - x2)
    rises = min(y for _, y in last) > max(y for _, y in first)
    slope = (y3 - y1) / (x3 - x1)
    return slope if rises and early > 0 and late >= early / 2 and slope >= smallest else None


class LeakWatch:
    """Records memory between windows; where it grows, finds out whether the steps or the loader are the cause."""

    def __init__(self, charge: Charge, device_type: str) -> None:
        self._charge = charge
        self._smallest = _SMALLEST_BYTES[device_type]
        self._samples: list[tuple[int, int]] = []

    def note(self, step: int) -> None:
        """Record the memory after this optimizer step."""
        live = self._charge.live_bytes()
        if live is not None:
            self._samples.append((step, live))

    def suspected(self, after: int = 0) -> float | None:
        """Bytes a step, if memory has grown.

        Args:
            after: the last step of parity, whose samples the loader then gives again, so that a cache which they
                filled stands still for a while: earlier steps count only where those that follow are too few.
        """
        later = [sample for sample in self._samples if sample[0] > after]
        return growth(later if _is_evidence(later) else self._samples, self._smallest)

    @property
    def is_decided(self) -> bool:
        """Whether the records are enough to tell growth from none."""
        return _is_evidence(self._samples)

    def confirm(self, steps: Steps, limit_s: float) -> float | None:
        """Whether memory still grows when the loader gives nothing new.

        A dataset that keeps what it has read grows for a whole epoch and is no leak of the steps; this many more steps
        on one and the same batch tell the two apart.

        Args:
            steps: the training that is suspected.
            limit_s: seconds it may take; fewer steps confirm nothing.

        Returns:
            Bytes a step; None where the steps are not to blame.
        """
        batch, _ = steps.feed.next()
        began_s = perf_counter()
        self._samples.clear()
        while len(self._samples) < _NUM_STEPS and perf_counter() - began_s < limit_s:
            steps.repeat(batch)
            steps.settle()
            self.note(steps.num_steps)
        return self.suspected()


def _is_evidence(samples: Sequence[tuple[int, int]]) -> bool:
    return len(samples) >= _FEWEST_SAMPLES and samples[-1][0] - samples[0][0] >= _NUM_STEPS - 1


def _middle(samples: Sequence[tuple[int, int]]) -> tuple[float, float]:
    return statistics.median(x for x, _ in samples), statistics.median(y for _, y in samples)
