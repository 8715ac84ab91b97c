"""What runs trials: the executor contract, the fork server, the trial child, and the executors."""

from __future__ import annotations

from ._base import Executor, ended, result_of
from .outcome import (
    STOPPED,
    Compared,
    Crashed,
    CutsJudged,
    Dropped,
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
from .request import (
    REQUEST,
    CompareRequest,
    InspectRequest,
    JudgeRequest,
    MeasureRequest,
    PredictRequest,
    ProfileRequest,
    TrialRequest,
)

__all__ = [
    "REQUEST",
    "STOPPED",
    "CompareRequest",
    "Compared",
    "Crashed",
    "CutsJudged",
    "Dropped",
    "Estimated",
    "Executor",
    "Failed",
    "InspectRequest",
    "Inspected",
    "JudgeRequest",
    "Lost",
    "MeasureRequest",
    "Measured",
    "NonFinite",
    "OutOfMemory",
    "Outcome",
    "PredictRequest",
    "Predicted",
    "ProfileRequest",
    "Profiled",
    "TimedOut",
    "TrialRequest",
    "ended",
    "result_of",
]
