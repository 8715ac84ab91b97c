"""Peak memory without running: what a step allocates at any batch, from a few over tensors without values."""

from __future__ import annotations

from .estimated import Calibration, Estimate, EstimateOptions, Fill, Fit, Interval, Prediction, PredictOptions, untried

__all__ = [
    "Calibration",
    "Estimate",
    "EstimateOptions",
    "Fill",
    "Fit",
    "Interval",
    "PredictOptions",
    "Prediction",
    "untried",
]
