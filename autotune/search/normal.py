"""What can be said of a normal variable in closed form."""

from __future__ import annotations

import math

import numpy as np

from .process import Array

__all__ = ["at_least", "expected_improvement", "normal_cdf"]

_TINY = 1e-12


def at_least(bound: float, mean: float, variance: float) -> tuple[float, float]:
    """A value and its standard error that, learned beside a normal belief, leave its moments above ``bound``.

    Sources: Minka 2001 (expectation propagation); Johnson, Kotz, Balakrishnan 1994, 13.10 (the truncated normal).
    """
    spread = math.sqrt(variance)
    z = (mean - bound) / spread
    hazard = float(np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) / max(normal_cdf(np.array([z]))[0], 1e-12))
    hazard = max(hazard, -z)  # their limit, where the belief lies far below the bound
    shrink = min(max(hazard * (hazard + z), 1e-6), 1 - 1e-6)
    error = variance * (1 / shrink - 1)
    return mean + spread * hazard / shrink, math.sqrt(error)


def expected_improvement(mean: Array, spread: Array) -> Array:
    """Of a normal variable over 0."""
    z = mean / np.maximum(spread, _TINY)
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return np.maximum(mean * normal_cdf(z) + spread * density, 0.0)


def normal_cdf(z: Array) -> Array:
    """The standard normal distribution function, within 1e-7. Source: Abramowitz and Stegun 26.2.17."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi) * series
    return np.where(z > 0, 1 - tail, tail)
