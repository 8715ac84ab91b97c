"""A Gaussian process over a finite set of configurations, averaged over what its hyperparameters may be.

The kernel is an ANOVA: one level for all, a main effect for each parameter, an interaction for each pair of parameters,
and a remainder that is a configuration's own. With 3 to 30 measurements no single value of the hyperparameters is
certain: many are drawn from their priors and weighed by how well each explains what was measured.

Sources: Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, eq. 2.25 to 2.30 (posterior, evidence) and
5.4.2 (leaving one out); Plate 1999 and Duvenaud et al. 2011, arXiv:1112.4394 (additive kernels by order of interaction).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Indices", "LogNormal", "Posterior", "Prior", "Process", "Surface"]

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

_NUM_DRAWN = 512
"""Hyperparameters drawn from the priors."""
_NUM_KEPT = 16
"""Of them kept, by evidence."""
_JITTER = 1e-10
_OUTLIER = 3.0
"""Standard deviations from what all the others say, above which a measurement's noise is taken to be that large."""


@dataclass(frozen=True)
class LogNormal:
    """A positive quantity, known to a factor."""

    median: float
    """Half of the probability lies below."""
    spread: float
    """Standard deviation of its logarithm."""

    def draw(self, generator: np.random.Generator, *shape: int) -> Array:
        """Independent values."""
        return self.median * np.exp(self.spread * generator.standard_normal(shape))


@dataclass(frozen=True)
class Prior:
    """What the hyperparameters may be; all are standard deviations, in the units of what is modelled."""

    level: float
    """Of the level that all configurations share."""
    main: LogNormal
    """Of a parameter's main effect."""
    pair: LogNormal
    """Of an interaction, as a share of the geometric mean of its two main effects' ones."""
    rest: LogNormal
    """Of what is a configuration's own."""
    noise: LogNormal
    """Between two measurements of one configuration, besides what each measurement says of itself."""


@dataclass(frozen=True)
class Surface:
    """The configurations, as a process sees them, and what is thought of them before any is measured."""

    positions: Array
    """(configurations, parameters): a level's number, or where it lies along an ordered parameter, one being the distance
    over which values are similar."""
    is_ordered: NDArray[np.bool_]
    """(parameters,)."""
    means: Array
    """(alternatives, configurations): prior means, equally likely."""
    trends: Array
    """(configurations, trends): deviations from them, each column times a standard normal factor."""

    def similarity(self, left: Indices, right: Indices) -> Array:
        """(parameters, left, right), in [0, 1]."""
        apart = self.positions[left].T[:, :, None] - self.positions[right].T[:, None, :]
        return np.where(self.is_ordered[:, None, None], np.exp(-0.5 * apart**2), apart == 0)


class Process:
    """The prior: :meth:`given` measurements, it becomes a :class:`Posterior`."""

    def __init__(self, surface: Surface, prior: Prior, seed: int) -> None:
        self.surface, self.level = surface, prior.level
        generator = np.random.default_rng(seed)
        self._main = prior.main.draw(generator, _NUM_DRAWN, surface.positions.shape[1])
        self._pair = prior.pair.draw(generator, _NUM_DRAWN)
        self._rest = prior.rest.draw(generator, _NUM_DRAWN)
        self._noise = prior.noise.draw(generator, _NUM_DRAWN)
        self._alternative = generator.integers(len(surface.means), size=_NUM_DRAWN)
        self._uniform = generator.random()

    def given(self, index: Indices, values: Array, variances: Array) -> Posterior:
        """Learn from measurements.

        Args:
            index: the configuration of each; one may be measured repeatedly.
            values: what was measured.
            variances: of each, as the measurement itself states it.
        """
        everything = np.arange(_NUM_DRAWN)
        if len(index) == 0:
            return Posterior(self, everything[:_NUM_KEPT], np.full(_NUM_KEPT, 1 / _NUM_KEPT), index, values, variances)
        for _ in range(2):
            covariance = self.covariance(everything, index, index) + self.noise(everything, variances)
            residuals = values - self.means(everything, index)
            inverse = np.linalg.inv(covariance)
            solved = np.einsum("tij,tj->ti", inverse, residuals)
            evidence = -0.5 * (np.einsum("ti,ti->t", residuals, solved) + np.linalg.slogdet(covariance)[1])
            weights = np.exp(evidence - evidence.max())
            weights /= weights.sum()
            excess = _excess(solved, np.einsum("tii->ti", inverse), weights)
            if not excess.any():
                break
            variances = variances + excess
        kept, counts = np.unique(self._resampled(weights), return_counts=True)
        return Posterior(self, kept, counts / _NUM_KEPT, index, values, variances)

    def means(self, drawn: Indices, index: Indices) -> Array:
        """(drawn, index): prior means."""
        return self.surface.means[self._alternative[drawn]][:, index]

    def noise(self, drawn: Indices, variances: Array) -> Array:
        """(drawn, index, index): of measurements that state ``variances`` of themselves."""
        noise: Array = (self._noise[drawn, None] ** 2 + variances + _JITTER)[:, :, None] * np.eye(len(variances))
        return noise

    def noise_variance(self, drawn: Indices) -> Array:
        """(drawn,): between two measurements of one configuration."""
        return self._noise[drawn] ** 2

    def covariance(self, drawn: Indices, left: Indices, right: Indices) -> Array:
        """(drawn, left, right): prior covariance of values."""
        similar = self.surface.similarity(left, right)
        similar = similar.reshape(len(similar), len(left) * len(right))
        main, size = self._main[drawn], (len(drawn), len(left), len(right))
        pairs = ((main @ similar) ** 2 - main**2 @ similar**2) / 2  # the sum over pairs, by the square of the sum
        varied = (main**2 @ similar + self._pair[drawn, None] ** 2 * pairs).reshape(size)
        own = self._rest[drawn, None, None] ** 2 * (left[:, None] == right)
        shared = self.level**2 + self.surface.trends[left] @ self.surface.trends[right].T
        covariance: Array = varied + own + shared
        return covariance

    def variance(self, drawn: Indices, index: Indices) -> Array:
        """(drawn, index): the diagonal of :meth:`covariance`."""
        main = self._main[drawn]
        pairs = (main.sum(1) ** 2 - (main**2).sum(1)) / 2
        varied = (main**2).sum(1) + self._pair[drawn] ** 2 * pairs + self._rest[drawn] ** 2
        variance: Array = varied[:, None] + self.level**2 + (self.surface.trends[index] ** 2).sum(1)
        return variance

    def _resampled(self, weights: Array) -> Indices:
        """Systematic resampling: each as often as its weight says, up to one."""
        steps = (np.arange(_NUM_KEPT) + self._uniform) / _NUM_KEPT
        return np.minimum(np.searchsorted(np.cumsum(weights), steps), _NUM_DRAWN - 1)


class Posterior:
    """A process that has seen measurements."""

    def __init__(
        self, process: Process, drawn: Indices, weights: Array, index: Indices, values: Array, variances: Array
    ) -> None:
        self.weights = weights
        """(drawn,): of the hyperparameters, summing to 1."""
        self.noise_variance = process.noise_variance(drawn)
        """(drawn,): between two measurements of one configuration."""
        self._process, self._drawn, self._index = process, drawn, index
        covariance = process.covariance(drawn, index, index) + process.noise(drawn, variances)
        self._root = np.linalg.inv(np.linalg.cholesky(covariance))
        self._solved = np.einsum("tij,tj->ti", self._root, values - process.means(drawn, index))

    def marginals(self, asked: Indices) -> tuple[Array, Array]:
        """Means and variances of the values at ``asked``, each (drawn, asked)."""
        mean, explained = self._explained(asked)
        return mean, np.maximum(self._process.variance(self._drawn, asked) - (explained**2).sum(1), 0.0)

    def overall(self, number: int) -> tuple[float, float]:
        """Mean and variance at one configuration, over all hyperparameters."""
        means, variances = self.marginals(np.array([number]))
        mean = float(self.weights @ means[:, 0])
        return mean, float(self.weights @ (variances[:, 0] + (means[:, 0] - mean) ** 2))

    def above(self, asked: Indices, base: int) -> tuple[Array, Array]:
        """Means and variances of how far ``asked`` lie above ``base``, each (drawn, asked)."""
        one = np.array([base])
        mean, explained = self._explained(asked)
        base_mean, base_explained = self._explained(one)
        between = self._process.covariance(self._drawn, asked, one)[:, :, 0]
        prior = self._process.variance(self._drawn, asked) + self._process.variance(self._drawn, one) - 2 * between
        return mean - base_mean, np.maximum(prior - ((explained - base_explained) ** 2).sum(1), 0.0)

    def draw(self, asked: Indices, num_draws: int, generator: np.random.Generator) -> Array:
        """(num_draws, asked): joint values, in random order."""
        mean, explained = self._explained(asked)
        covariance = self._process.covariance(self._drawn, asked, asked)
        covariance = covariance - np.einsum("tia,tib->tab", explained, explained)
        size = np.einsum("taa->t", covariance)[:, None, None] / len(asked)
        roots = np.linalg.cholesky(covariance + (1e-9 * size + _JITTER) * np.eye(len(asked)))
        chosen = generator.choice(len(self.weights), num_draws, p=self.weights)
        normal = generator.standard_normal((num_draws, len(asked)))
        drawn = mean[chosen]
        for each in np.unique(chosen):
            drawn[chosen == each] += normal[chosen == each] @ roots[each].T
        return drawn

    def _explained(self, asked: Indices) -> tuple[Array, Array]:
        """Posterior means (drawn, asked), and (drawn, measured, asked) whose square is the variance explained."""
        explained = self._root @ self._process.covariance(self._drawn, self._index, asked)
        mean = self._process.means(self._drawn, asked) + np.einsum("ti,tia->ta", self._solved, explained)
        return mean, explained


def _excess(solved: Array, precisions: Array, weights: Array) -> Array:
    """Variance to add to each measurement so that none lies further from what the others say than an outlier's bound."""
    apart = weights @ (solved / precisions) ** 2
    allowed = _OUTLIER**2 * (weights @ (1 / precisions))
    return np.where(apart > allowed, apart - allowed, 0.0)
