"""What a search believes before any trial: of speed from counted work, of memory from the law, of failure nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .configurations import Configurations
from .process import Array, LogNormal, Prior, Process

__all__ = ["Priors"]

_SPEED = Prior(
    level=5.0,
    main=LogNormal(0.03, 1.0),
    pair=LogNormal(0.5, 0.5),
    rest=LogNormal(0.01, 0.7),
    noise=LogNormal(0.01, 0.7),
)
"""Of the logarithm of samples per second."""
_PEAK = Prior(
    level=0.03,
    main=LogNormal(0.005, 1.0),
    pair=LogNormal(0.5, 0.5),
    rest=LogNormal(0.004, 0.7),
    noise=LogNormal(0.004, 1.0),
)
"""Of the logarithm of the measured peak over the predicted one."""
_PEAK_UNPREDICTED = Prior(
    level=2.0,
    main=LogNormal(0.1, 0.8),
    pair=LogNormal(0.4, 0.5),
    rest=LogNormal(0.01, 0.7),
    noise=LogNormal(0.01, 0.7),
)
"""Of the logarithm of the measured peak over the limit, where no peak is predicted."""
_FAILURE = Prior(
    level=0.05, main=LogNormal(0.4, 0.0), pair=LogNormal(0.3, 0.0), rest=LogNormal(0.1, 0.0), noise=LogNormal(0.1, 0.0)
)
"""Of a score that is 1 where a trial failed and 0 where it did not."""

_SLOPES = {"flops_per_sample": (0.8, 0.3), "bytes_per_sample": (0.3, 0.3)}
"""Mean and standard deviation of the powers of counted work that a sample takes. Recomputing all blocks,
4/3 of the work, was measured to take 1.35 and 1.5 times as long: powers of 1.0 and 1.4 in all."""
_HALVES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""Micro-batches at which half of the best speed is reached, over the geometric mean of those there are."""
_CONSTANT = 0.02
"""Standard deviation of memory that the prediction leaves out whatever the configuration, as a share of the limit."""
_ABOVE = 0.02
"""Share by which the upper end of a prediction lies above it where its own error is as :data:`_PEAK` has it; wider ones
are believed less in proportion. It is the least there is (``autotune.estimate.baseline``)."""
_UNPREDICTED = 0.5
"""Standard deviation of what each level adds to the logarithm of a peak without a prediction."""


@dataclass(frozen=True)
class Priors:
    """What is believed before any trial; made once."""

    configurations: Configurations
    speed: Process
    peak: Process
    failure: Process
    log_predicted: Array
    """(configurations,): logarithm of the predicted peak; where there is none, the mean of all or, without any, the
    limit's."""

    @classmethod
    def of(cls, configurations: Configurations, limit_bytes: int | None, seed: int) -> Priors:
        """Start from what is predicted."""
        log_predicted = np.log(configurations.predicted("peak_bytes"))
        failure = configurations.surface(np.zeros((1, len(configurations))), np.zeros((len(configurations), 0)))
        return cls(
            configurations,
            _speed_process(configurations, seed),
            _peak_process(configurations, limit_bytes, seed),
            Process(failure, _FAILURE, seed),
            _filled(log_predicted, math.log(limit_bytes or 1)),
        )


def _speed_process(configurations: Configurations, seed: int) -> Process:
    """A step of m samples takes a + b m: speed saturates as m / (h + m), h being of unknown size."""
    means = -np.log1p(np.array(_HALVES)[:, None] / _relative(configurations.micro_batches()))
    trends = []
    for what, (slope, spread) in _SLOPES.items():
        work = _filled(np.log(configurations.predicted(what)), 0.0)
        work = work - work.mean()
        means = means - slope * work
        trends.append(spread * work)
    for gains in configurations.prior_gains():
        means = means + gains[:, 0]
        trends.append(gains[:, 1])
    return Process(configurations.surface(means, np.column_stack(trends)), _SPEED, seed + 1)


def _peak_process(configurations: Configurations, limit: int | None, seed: int) -> Process:
    """Predictions are right to a factor and a constant, and to what each says of itself; what has none has a base and
    what grows with the batch."""
    predicted = configurations.predicted("peak_bytes")
    unknown = np.isnan(predicted)
    own = _filled(configurations.predicted("high_bytes") / predicted - 1, _ABOVE) / _ABOVE
    grown = np.log(np.array(_HALVES)[:, None] + _relative(configurations.micro_batches()))
    constant = np.where(unknown, 0.0, _CONSTANT * (limit or 0.0) / predicted)
    trends = np.column_stack([constant, unknown[:, None] * configurations.indicators() * _UNPREDICTED])
    surface = configurations.surface(np.where(unknown, grown, 0.0), trends, own)
    return Process(surface, _PEAK_UNPREDICTED if unknown.all() else _PEAK, seed + 2)


def _relative(batches: Array) -> Array:
    """Micro-batches over their geometric mean."""
    relative: Array = batches / math.exp(np.log(batches).mean())
    return relative


def _filled(values: Array, default: float) -> Array:
    """With the mean of those that are known for those that are not; with ``default`` where none is."""
    known = ~np.isnan(values)
    return np.where(known, values, values[known].mean() if known.any() else default)
