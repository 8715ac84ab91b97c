"""The predicted speed and peak of a configuration, before it was measured."""

from __future__ import annotations

import math
from typing import Self

from pydantic import BaseModel, ConfigDict

_Z = 1.96
"""Standard deviations on either side in a 95 % interval."""
_UNKNOWN = 1.0
"""Standard deviation of a logarithm from which on a value is as good as unknown: its interval spans a factor of 50."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Range(_Frozen):
    """A value with the 95 % interval of one measurement of it."""

    low: float
    """Lower end."""
    value: float
    """The median."""
    high: float
    """Upper end."""

    @classmethod
    def of(cls, mean: float, variance: float) -> Self | None:
        """From the mean and the variance of its natural logarithm; None where hardly anything was known."""
        deviation = math.sqrt(variance)
        if deviation > _UNKNOWN:
            return None
        low, value, high = (math.exp(mean + z * deviation) for z in (-_Z, 0.0, _Z))
        return cls(low=low, value=value, high=high)


class Forecast(_Frozen):
    """Predicted speed and peak, from the memory model and earlier trials."""

    samples_per_s: Range | None
    """Samples per second; None where hardly anything was known."""
    peak_bytes: Range | None
    """Bytes that the device charges; None as above."""
