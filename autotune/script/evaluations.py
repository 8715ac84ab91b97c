"""A script's own evaluations in a trial: how many samples at once, and how long the last one took."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..measure.evaluation import EvaluationRecord
from ..measure.measurement import Evaluated
from ..measure.timing.compile_time import CompileTime


class Evaluations:
    """Told of each call of the model to evaluate, and of the end of each evaluation."""

    def __init__(self, batch: int | None, device: torch.device, compile_time: CompileTime) -> None:
        """
        Args:
            batch: samples that the script was told to evaluate at once; None where it was told of none.
            device: that it runs on.
            compile_time: left out of an evaluation's time.
        """
        self._batch, self._device, self._compile_time = batch, device, compile_time
        self._record: EvaluationRecord | None = None
        self._last: Evaluated | None = None

    def call(self, num_samples: int) -> None:
        """The model evaluates so many samples."""
        self._record = self._record or EvaluationRecord(self._device, self._compile_time)
        self._record.call(num_samples)

    def end(self, peak_bytes: Callable[[], int]) -> None:
        """Training goes on, after an evaluation or not."""
        if self._record is not None:
            self._last, self._record = self._record.ended(self._batch, peak_bytes), None

    def found(self) -> tuple[Evaluated, ...]:
        """The last of them, which nothing was new to; none of a script that was not told how many samples to take."""
        if self._batch is None:
            return ()
        return (self._last or Evaluated(batch=self._batch, seconds=0.0, is_whole=False, peak_bytes=0),)
