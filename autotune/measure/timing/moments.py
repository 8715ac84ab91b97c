"""Points in time of a training, by the clock or on a CUDA device's stream, without waiting for the device."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


def moment(device: torch.device) -> Any:
    """Now; on a CUDA device, once what was asked of it before is done."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """From one :func:`moment` to another of the same device; waits for the latter where it has not come yet."""
    if isinstance(ended, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000
