"""``batch``: its contract, and gradients of split batches by hand arithmetic."""

from __future__ import annotations

from autotune.techniques import Technique
from autotune.techniques.batch import Batch
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import BATCH_SIZE


class TestBatch(TechniqueContract):
    technique = Batch
    keeps_random_numbers = False
    lacking = (Batch(micro=4, accumulate=2), Batch(micro=3, accumulate=3, effective=8))

    def default(self) -> Technique:
        return Batch(micro=BATCH_SIZE)
