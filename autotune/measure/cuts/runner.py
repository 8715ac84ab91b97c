"""``Runner``: a training that recovers, beside others in the same process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from ...randomness import Randomness
from ...techniques import Settings
from ..checks.quality import Recovery
from ..checks.scores import Judged


@dataclass
class Runner:
    """A training that recovers, with random numbers of its own, so that others may go on in between."""

    recovery: Recovery
    settings: Settings
    random: Randomness
    seconds: list[float] = field(default_factory=list)
    """Of steps: on a CPU those of the processor, on one thread, which other work does not change."""

    def step(self) -> None:
        """One step, timed."""
        device = self.recovery.training.device
        with self.random:
            began_s = _now(device)
            self.recovery.step()
            self.seconds.append(_now(device) - began_s)

    def until(self, share: float) -> Judged:
        """Train on until this share of the samples; what ``evaluate`` says then."""
        with self.random:
            self.recovery.until(share)
            return self.recovery.evaluate()


def _now(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
