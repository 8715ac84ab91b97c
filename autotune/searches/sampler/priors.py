"""What a search believes before any trial: of speed from counted work, of memory from tracing, of failure nothing,
of quality that it falls the more, the more of the model goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .configurations import Configuration, Configurations
from .surrogate import Array, Indices, Scales, Surrogate

_SPEED = Scales(level=5.0, main=0.12, pair=0.075, own=0.024, noise=0.1)
"""Scales of the logarithm of samples per second. In the five tables of ``benchmarks/replay``, repeats hours apart
differ by 0.09 to 0.15."""
_PEAK = Scales(level=0.03, main=0.008, pair=0.005, own=0.004, noise=0.006)
"""Scales of the logarithm of the measured peak over the predicted one."""
_PEAK_UNPREDICTED = Scales(level=2.0, main=0.19, pair=0.1, own=0.016, noise=0.016)
"""Scales of the logarithm of the measured peak over the limit, where no peak is predicted."""
_FAILURE = Scales(level=0.05, main=0.4, pair=0.12, own=0.1, noise=0.1)
"""Scales of a score that is 1 for a trial that failed and 0 for one that did not."""

_QUALITY = Scales(level=0.0, main=0.0, pair=0.0, own=0.5, noise=0.4)
"""Of the inverse hyperbolic sine of the drop in quality over the allowed one: even near 0, a logarithm far from it. The
noise is that from seed to seed."""
_LOST, _ALIKE, _APART = 4.0, 2.0, 1.5
"""Of that, what a technique costs by the square of the share of the model that it takes away: the mean, and standard
deviations of how much models bear, whatever the technique, and of how much of this technique. A quarter costs next to
nothing as a rule, a half is as likely as not more than is allowed. Where one technique costs more than is believed, so
do others: what several take away together is seldom borne by chance.

Source: four models cut and trained on by hand, 1 % of their quality allowed: 0 to 0.5 with a quarter of the widths
gone, 0 to 1.8 with a half, 0.5 to 3.7 with three quarters."""

_SLOPES = {"flops_per_sample": (0.8, 0.3), "bytes_per_sample": (0.3, 0.3)}
"""Mean and standard deviation of the powers of counted work that a sample takes. Recomputing all blocks,
4/3 of the work, was measured to take 1.35 and 1.5 times as long: powers of 1.0 and 1.4 in all."""
_HALVES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""Micro-batches at which half of the best speed is reached, over the geometric mean of those there are: equally likely
guesses."""
_CONSTANT = 0.02
"""Standard deviation of memory that the prediction leaves out whatever the configuration, as a share of the limit."""
_ABOVE = 0.02
"""Share by which the upper end of a prediction lies above it where its own error is as :data:`_PEAK` has it; wider ones
are believed less in proportion. It is the least there is (``autotune.estimates.allocators.process``)."""
_UNPREDICTED = 0.5
"""Standard deviation of what each level adds to the logarithm of a peak without a prediction."""


@dataclass(frozen=True)
class Priors:
    """What is believed before any trial; made once."""

    speed: Surrogate
    peak: Surrogate
    failure: Surrogate
    quality: Surrogate
    """Over functions, not configurations."""
    function: Indices
    """(configurations,): the number of what each computes; 0 is what the reference does."""
    log_predicted: Array
    """(configurations,): logarithm of the predicted peak; where there is none, the mean of all or, without any, the
    limit's."""

    @classmethod
    def of(cls, configurations: Configurations, limit_bytes: int | None) -> Priors:
        """Start from what is predicted."""
        count = len(configurations)
        functions, function = configurations.functions()
        log_predicted = np.log(configurations.predicted("peak_bytes"))
        return cls(
            _speed(configurations),
            _peak(configurations, limit_bytes),
            Surrogate(*configurations.inputs(), np.zeros(count), np.zeros((count, 0)), _FAILURE, np.ones(count)),
            _quality(functions),
            function,
            _filled(log_predicted, math.log(limit_bytes or 1)),
        )


def _speed(configurations: Configurations) -> Surrogate:
    """A step of m samples takes a + b m: speed saturates as m / (h + m), h being of unknown size."""
    curves = -np.log1p(np.array(_HALVES)[:, None] / _relative(configurations.micro_batches()))
    mean, trends = _moments(curves)
    for what, (slope, spread) in _SLOPES.items():
        work = _filled(np.log(configurations.predicted(what)), 0.0)
        work = work - work.mean()
        mean = mean - slope * work
        trends.append(spread * work)
    for gains in configurations.prior_gains():
        mean = mean + gains[:, 0]
        trends.append(gains[:, 1])
    return Surrogate(*configurations.inputs(), mean, np.column_stack(trends), _SPEED, np.ones(len(mean)))


def _peak(configurations: Configurations, limit: int | None) -> Surrogate:
    """Predictions are right to a factor and a constant, and to what each says of itself; what has none has a base and
    what grows with the batch."""
    predicted = configurations.predicted("peak_bytes")
    unknown = np.isnan(predicted)
    own = _filled(configurations.predicted("high_bytes") / predicted - 1, _ABOVE) / _ABOVE
    curves = np.log(np.array(_HALVES)[:, None] + _relative(configurations.micro_batches()))
    mean, trends = _moments(np.where(unknown, curves, 0.0))
    constant = np.where(unknown, 0.0, _CONSTANT * (limit or 0.0) / predicted)
    columns = np.column_stack([*trends, constant, unknown[:, None] * configurations.indicators() * _UNPREDICTED])
    scales = _PEAK_UNPREDICTED if unknown.all() else _PEAK
    return Surrogate(*configurations.inputs(), mean, columns, scales, own)


def _quality(functions: Sequence[Configuration]) -> Surrogate:
    """What each technique takes away costs quality, more than in proportion, and several cost what each does at least;
    the reference's own is what it is."""
    names = sorted({name for row in functions for name in row.removed})
    rows = [[row.removed.get(name, 0.0) for name in names] for row in functions]
    costs = np.array(rows).reshape(len(functions), len(names)) ** 2
    changes = np.array([float(bool(row.function)) for row in functions])
    trends = np.column_stack([_ALIKE * costs.sum(1), _APART * costs])
    nothing = np.zeros((len(functions), 0))
    return Surrogate(nothing, np.zeros(0, dtype=bool), _LOST * costs.sum(1), trends, _QUALITY, changes)


def _moments(curves: Array) -> tuple[Array, list[Array]]:
    """Mean of equally likely curves, and trends with their covariance."""
    mean = curves.mean(0)
    return mean, list((curves - mean) / math.sqrt(len(curves)))


def _relative(batches: Array) -> Array:
    """Micro-batches over their geometric mean."""
    relative: Array = batches / math.exp(np.log(batches).mean())
    return relative


def _filled(values: Array, default: float) -> Array:
    """With the mean of those that are known for those that are not; with ``default`` where none is."""
    known = ~np.isnan(values)
    return np.where(known, values, values[known].mean() if known.any() else default)
