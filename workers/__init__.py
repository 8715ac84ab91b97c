"""What runs trials: the executor contract, the fork server, the trial child, and the executors."""

from __future__ import annotations

from ._base import Executor, TrialRequest, ended, result_of
from .outcome import (
    STOPPED,
    Crashed,
    Estimated,
    Failed,
    Inspected,
    Lost,
    Measured,
    NonFinite,
    Outcome,
    OutOfMemory,
    Predicted,
    Profiled,
    TimedOut,
)

__all__ = [
    "STOPPED",
    "Crashed",
    "Estimated",
    "Executor",
    "Failed",
    "Inspected",
    "Lost",
    "Measured",
    "NonFinite",
    "OutOfMemory",
    "Outcome",
    "Predicted",
    "Profiled",
    "TimedOut",
    "TrialRequest",
    "ended",
    "result_of",
]
