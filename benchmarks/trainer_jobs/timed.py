"""A job timed from outside: whole optimizer steps, by torch's global hook, whoever makes them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["WARM_UP", "Timed"]

WARM_UP = 5
"""Optimizer steps before the clock starts."""


class _Ended(Exception):
    """Enough was seen: the job ends."""


class Timed:
    """Times so many optimizer steps within its block, then ends that, having written what was seen."""

    def __init__(self, out: str, num_steps: int, samples_per_step: int) -> None:
        """
        Args:
            out: a file, for one JSON row: samples/s, the largest resident set in bytes, torch's threads.
            num_steps: that are timed.
            samples_per_step: in each.
        """
        self.losses: list[float] = []
        """Of micro-batches, for a job that tells them."""
        self._out, self._num_steps, self._samples = Path(out), num_steps, samples_per_step
        self._seen, self._began_s = 0, 0.0

    def __enter__(self) -> Timed:
        self._hook = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self._hook.remove()
        return isinstance(error, _Ended)

    def _stepped(self, *_: Any) -> None:
        self._seen += 1
        if self._seen == WARM_UP:
            self._began_s = time.perf_counter()
        if self._seen < WARM_UP + self._num_steps:
            return
        seconds = time.perf_counter() - self._began_s
        status = Path("/proc/self/status").read_text()
        row = {
            "samples_per_s": self._num_steps * self._samples / seconds,
            "peak_bytes": int(status.partition("VmHWM:")[2].split()[0]) * 1024,
            "threads": torch.get_num_threads(),
            "losses": [loss.hex() for loss in self.losses],
        }
        self._out.write_text(json.dumps(row))
        raise _Ended
