"""Peak memory without running a model: what a step allocates at any batch, from a few steps over fake tensors."""

from __future__ import annotations

from .types import (
    WORKER_BYTES,
    Calibration,
    Cheapest,
    CheapestOptions,
    Estimate,
    EstimateOptions,
    Fill,
    Fit,
    Interval,
    Prediction,
    PredictOptions,
    untried,
)

__all__ = [
    "WORKER_BYTES",
    "Calibration",
    "Cheapest",
    "CheapestOptions",
    "Estimate",
    "EstimateOptions",
    "Fill",
    "Fit",
    "Interval",
    "PredictOptions",
    "Prediction",
    "untried",
]
