"""Leaks: memory that grows with each optimizer step and is never freed."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ..life.growth import FEWEST_SAMPLES, growth
from ..memory import Charge
from ..steps import Steps

_NUM_STEPS = 30
_SUSPECTED_SPAN = 15
"""Steps from which on growth is worth confirming: a short trial on a busy machine comes to no more."""
_SMALLEST_BYTES = {"cpu": 32 * 1024, "cuda": 4 * 1024}
"""Bytes a step below which growth is noise: resident memory comes in pages and arenas, CUDA's count is exact."""


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
        if _is_evidence(later):
            return growth(later, self._smallest)
        return growth(self._samples, self._smallest, span=_SUSPECTED_SPAN)

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
        return growth(self._samples, self._smallest)


def _is_evidence(samples: Sequence[tuple[int, int]]) -> bool:
    return len(samples) >= FEWEST_SAMPLES and samples[-1][0] - samples[0][0] >= _NUM_STEPS - 1
