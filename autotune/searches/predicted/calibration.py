"""Corrects predictions of the process by the peaks that finished trials measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...estimates import Calibration, Interval

_CONSTANT, _SHARE = 0.03, 0.03
"""Prior standard deviations of the correction: of its constant, as a share of the mean prediction, and of its share of
each prediction."""
_ONE_IN_TWENTY = 1.645
"""Standard deviations to the 95th percentile of a normal distribution."""
_WEIGHT = 4.0
"""Weight of the stated intervals, in trials, against the variance that trials showed."""


def learn_calibration(rows: Sequence[tuple[Interval, int]]) -> Calibration:
    """Fit a constant and a share by which measured peaks exceed predictions: a linear regression with normal priors,
    each trial weighted by its own interval.

    Args:
        rows: of each trial, the process as it was predicted and its measured peak, bytes; at least one.

    Source: Bishop 2006, Pattern Recognition and Machine Learning, eq. 3.50 and 3.51.
    """
    predicted = np.array([float(interval.value) for interval, _ in rows])
    deviations = np.array([float(interval.high - interval.value) for interval, _ in rows]) / _ONE_IN_TWENTY
    off = np.array([float(measured) for _, measured in rows]) - predicted
    prior = 1 / np.array([_CONSTANT * predicted.mean(), _SHARE]) ** 2
    design = np.column_stack([np.ones(len(rows)), predicted]) / deviations[:, None]
    coefficients = np.linalg.solve(np.diag(prior) + design.T @ design, design.T @ (off / deviations))
    left = off / deviations - design @ coefficients
    variance = (_WEIGHT + left @ left) / (_WEIGHT + len(rows))
    constant, share = map(float, coefficients)
    return Calibration(
        constant_bytes=constant, share=share, widened=max(1.0, float(np.sqrt(variance))), num_trials=len(rows)
    )
