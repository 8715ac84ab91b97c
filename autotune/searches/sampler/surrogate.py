"""A surrogate of a quantity over a finite set of configurations: Gaussian regression in closed form, at fixed scales.

The prior covariance of configurations a and b is::

    level² + Σ trends(a) trends(b) + main² Σ s_p + pair² Σ s_p s_q + own(a)² [a = b]

with sums over parameters p and pairs p < q, where s_p is 1 for equal levels of a categorical parameter, and falls with
the distance along an ordered one as exp(-d² / 2).

Sources: Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, eq. 2.23 and 2.24 (posterior); Duvenaud
et al. 2011, arXiv:1112.4394 (additive kernels by order of interaction).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

_WEIGHT = 6.0
"""Measurements that the scales count for, against what the measured ones vary."""


@dataclass(frozen=True)
class Scales:
    """Hyperparameters: standard deviations, in the unit of the quantity."""

    level: float
    """Of what all configurations share."""
    main: float
    """Of a parameter's main effect."""
    pair: float
    """Of an interaction of two parameters."""
    own: float
    """Of what is a configuration's own."""
    noise: float
    """Between two measurements of one configuration, beside what each states of itself."""


@dataclass(frozen=True)
class Surrogate:
    """What is believed before any measurement."""

    inputs: Array
    """(configurations, parameters): the number of a level, or a place along an ordered parameter in length scales."""
    is_ordered: NDArray[np.bool_]
    """(parameters,)."""
    mean: Array
    """(configurations,)."""
    trends: Array
    """(configurations, trends): deviations from the mean, each column times a standard normal factor."""
    scales: Scales
    own_factors: Array
    """(configurations,): of :attr:`Scales.own`."""

    def covariance(self, left: Indices, right: Indices) -> Array:
        """(left, right)."""
        distances = self.inputs[left, None] - self.inputs[None, right]
        similar = np.where(self.is_ordered, np.exp(-0.5 * distances**2), distances == 0)
        total = similar.sum(2)
        pairs = (total**2 - (similar**2).sum(2)) / 2  # over pairs, by the square of the sum
        shared = self.scales.level**2 + self.trends[left] @ self.trends[right].T
        own = (self.scales.own * self.own_factors[left])[:, None] ** 2 * (left[:, None] == right)
        covariance: Array = shared + self.scales.main**2 * total + self.scales.pair**2 * pairs + own
        return covariance

    def variance(self) -> Array:
        """(configurations,): the diagonal of :meth:`covariance`."""
        count, scales = self.inputs.shape[1], self.scales
        shared = scales.level**2 + scales.main**2 * count + scales.pair**2 * count * (count - 1) / 2
        variance: Array = shared + (self.trends**2).sum(1) + (scales.own * self.own_factors) ** 2
        return variance


class Posterior:
    """Posterior after measurements.

    Where these lie further from what was believed than the scales allow for, or nearer, all scales are taken to be
    larger or smaller alike.

    Source: Shah, Wilson, Ghahramani 2014, arXiv:1402.4306, eq. 6 (Student-t processes).
    """

    def __init__(self, prior: Surrogate, index: Indices, values: Array, errors: Array) -> None:
        """Learn from measurements.

        Args:
            prior: what was believed before.
            index: the configuration of each; one may be measured repeatedly.
            values: what was measured.
            errors: standard error of each, as the measurement itself states it.
        """
        noise = prior.scales.noise**2 + errors**2
        root = np.linalg.cholesky(prior.covariance(index, index) + np.diag(noise))
        solved = solve_triangular(root, values - prior.mean[index], lower=True)
        everything = np.arange(len(prior.mean))
        self._prior = prior
        self._explained = solve_triangular(root, prior.covariance(index, everything), lower=True)
        self._ratio = float((_WEIGHT + solved @ solved) / (_WEIGHT + len(index)))
        """Of variances, to those at the scales as they are."""
        self.mean: Array = prior.mean + solved @ self._explained
        """(configurations,)."""
        left = np.maximum(prior.variance() - (self._explained**2).sum(0), 0.0)
        self.variance: Array = self._ratio * left
        """(configurations,)."""
        self.noise_variance = self._ratio * prior.scales.noise**2
        """Between two measurements of one configuration."""

    def covariance(self, left: Indices, right: Indices) -> Array:
        """(left, right)."""
        explained = self._explained[:, left].T @ self._explained[:, right]
        return np.asarray(self._ratio * (self._prior.covariance(left, right) - explained))
