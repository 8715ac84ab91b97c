"""A Gaussian process over a finite set of configurations, averaged over what its hyperparameters may be.

The kernel is an ANOVA: one level for all, a main effect for each parameter, an interaction for each pair of parameters,
and a remainder that is a configuration's own. With 3 to 30 measurements no single value of the hyperparameters is
certain: many are drawn from their priors and weighed by how well each explains what was measured.

Sources: Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, eq. 2.25 to 2.30 (posterior, evidence)
and 5.4.2 (leaving one out); Duvenaud et al. 2011, arXiv:1112.4394 (additive kernels by order of interaction).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Hyper", "Indices", "LogNormal", "Posterior", "Prior", "Process", "Surface"]

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

_NUM_DRAWN = 512
"""Hyperparameters drawn from the priors."""
_NUM_MOVED = 64
"""Of them moved about, chosen by evidence."""
_NUM_MOVES, _STEP = 8, 0.4
"""Moves of each, and their size in standard deviations of the prior."""
_NUM_KEPT = 16
"""Of them kept."""
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

    def at(self, normal: Array) -> Array:
        """The values that stand where a standard normal variable has these."""
        return self.median * np.exp(self.spread * normal)


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
    """(configurations, parameters): a level's number, or where it lies along an ordered parameter, one being the
    distance over which values are similar."""
    is_ordered: NDArray[np.bool_]
    """(parameters,)."""
    means: Array
    """(alternatives, configurations): prior means, equally likely."""
    trends: Array
    """(configurations, trends): deviations from them, each column times a standard normal factor."""
    own: Array
    """(configurations,): by how much more than :attr:`Prior.rest` each may be off by itself, as a factor."""

    def similarity(self, left: Indices, right: Indices) -> Array:
        """(parameters, left, right), in [0, 1]."""
        apart = self.positions[left].T[:, :, None] - self.positions[right].T[:, None, :]
        return np.where(self.is_ordered[:, None, None], np.exp(-0.5 * apart**2), apart == 0)


@dataclass(frozen=True)
class Hyper:
    """Draws of the hyperparameters."""

    main: Array
    """(draws, parameters)."""
    pair: Array
    """(draws,), as those below."""
    rest: Array
    noise: Array
    alternative: Indices
    """Which of the prior means."""


class Process:
    """The prior: :meth:`given` measurements, it becomes a :class:`Posterior`."""

    def __init__(self, surface: Surface, prior: Prior, seed: int) -> None:
        self.surface, self.prior, self._seed = surface, prior, seed
        generator = np.random.default_rng(seed)
        self._normal = generator.standard_normal((_NUM_DRAWN, surface.positions.shape[1] + 3))
        self._alternative = generator.integers(len(surface.means), size=_NUM_DRAWN)

    def given(self, index: Indices, values: Array, variances: Array) -> Posterior:
        """Learn from measurements.

        Args:
            index: the configuration of each; one may be measured repeatedly.
            values: what was measured.
            variances: of each, as the measurement itself states it.

        Source: Cotter et al. 2013, Statistical Science 28(3), eq. 4.3 (moves that keep a normal prior).
        """
        normal, alternative = self._normal, self._alternative
        if len(index) == 0:
            return Posterior(self, self.hyper(normal[:_NUM_KEPT], alternative[:_NUM_KEPT]), index, values, variances)
        drawn = self.hyper(normal, alternative)
        variances = variances + self._excess(drawn, index, values, variances)
        evidence = self._evidence(drawn, index, values, variances)
        chosen = _resampled(np.exp(evidence - evidence.max()), _NUM_MOVED)
        normal, alternative, evidence = normal[chosen], alternative[chosen], evidence[chosen]
        generator = np.random.default_rng(self._seed)
        for _ in range(_NUM_MOVES):
            moved = np.sqrt(1 - _STEP**2) * normal + _STEP * generator.standard_normal(normal.shape)
            other = generator.integers(len(self.surface.means), size=_NUM_MOVED)
            other = np.where(generator.random(_NUM_MOVED) < _STEP, other, alternative)
            then = self._evidence(self.hyper(moved, other), index, values, variances)
            better = np.log(generator.random(_NUM_MOVED)) < then - evidence
            normal = np.where(better[:, None], moved, normal)
            alternative, evidence = np.where(better, other, alternative), np.where(better, then, evidence)
        every = _NUM_MOVED // _NUM_KEPT
        return Posterior(self, self.hyper(normal[::every], alternative[::every]), index, values, variances)

    def hyper(self, normal: Array, alternative: Indices) -> Hyper:
        """Hyperparameters of as many draws as there are rows."""
        prior, (*main, pair, rest, noise) = self.prior, normal.T
        parameters = np.array(main).reshape(-1, len(normal)).T
        return Hyper(
            prior.main.at(parameters), prior.pair.at(pair), prior.rest.at(rest), prior.noise.at(noise), alternative
        )

    def means(self, hyper: Hyper, index: Indices) -> Array:
        """(draws, index): prior means."""
        return self.surface.means[hyper.alternative][:, index]

    def covariance(self, hyper: Hyper, left: Indices, right: Indices) -> Array:
        """(draws, left, right): prior covariance of values."""
        similar = self.surface.similarity(left, right)
        similar = similar.reshape(len(similar), len(left) * len(right))
        pairs = ((hyper.main @ similar) ** 2 - hyper.main**2 @ similar**2) / 2  # over pairs, by the square of the sum
        varied = (hyper.main**2 @ similar + hyper.pair[:, None] ** 2 * pairs).reshape(
            len(hyper.main), len(left), len(right)
        )
        own = (hyper.rest[:, None] * self.surface.own[left])[:, :, None] ** 2 * (left[:, None] == right)
        shared = self.prior.level**2 + self.surface.trends[left] @ self.surface.trends[right].T
        covariance: Array = varied + own + shared
        return covariance

    def variance(self, hyper: Hyper, index: Indices) -> Array:
        """(draws, index): the diagonal of :meth:`covariance`."""
        squares = (hyper.main**2).sum(1)
        pairs = (hyper.main.sum(1) ** 2 - squares) / 2
        varied = (squares + hyper.pair**2 * pairs)[:, None] + (hyper.rest[:, None] * self.surface.own[index]) ** 2
        variance: Array = varied + self.prior.level**2 + (self.surface.trends[index] ** 2).sum(1)
        return variance

    def measured(self, hyper: Hyper, index: Indices, variances: Array) -> Array:
        """(draws, index, index): covariance of measurements that state ``variances`` of themselves."""
        noise = (hyper.noise[:, None] ** 2 + variances + _JITTER)[:, :, None] * np.eye(len(variances))
        measured: Array = self.covariance(hyper, index, index) + noise
        return measured

    def _evidence(self, hyper: Hyper, index: Indices, values: Array, variances: Array) -> Array:
        """(draws,): logarithm of how well each explains the measurements, less a constant."""
        root = np.linalg.cholesky(self.measured(hyper, index, variances))
        solved = np.linalg.solve(root, (values - self.means(hyper, index))[:, :, None])[:, :, 0]
        evidence: Array = -0.5 * (solved**2).sum(1) - np.log(np.einsum("tii->ti", root)).sum(1)
        return evidence

    def _excess(self, hyper: Hyper, index: Indices, values: Array, variances: Array) -> Array:
        """Variance to add to each measurement, so that none lies further from the others than an outlier may."""
        evidence = self._evidence(hyper, index, values, variances)
        weights = np.exp(evidence - evidence.max())
        weights /= weights.sum()
        inverse = np.linalg.inv(self.measured(hyper, index, variances))
        precisions = np.einsum("tii->ti", inverse)
        apart = np.einsum("tij,tj->ti", inverse, values - self.means(hyper, index)) / precisions
        excess = weights @ apart**2 - _OUTLIER**2 * (weights @ (1 / precisions))
        return np.asarray(np.maximum(excess, 0.0))


class Posterior:
    """A process that has seen measurements."""

    def __init__(self, process: Process, hyper: Hyper, index: Indices, values: Array, variances: Array) -> None:
        self.noise_variance: Array = hyper.noise**2
        """(draws,): between two measurements of one configuration."""
        self._process, self._hyper, self._index = process, hyper, index
        self._root = np.linalg.inv(np.linalg.cholesky(process.measured(hyper, index, variances)))
        self._solved = np.einsum("tij,tj->ti", self._root, values - process.means(hyper, index))

    def marginals(self, asked: Indices) -> tuple[Array, Array]:
        """Means and variances of the values at ``asked``, each (draws, asked)."""
        mean, explained = self._explained(asked)
        return mean, np.maximum(self._process.variance(self._hyper, asked) - (explained**2).sum(1), 0.0)

    def overall(self, number: int) -> tuple[float, float]:
        """Mean and variance at one configuration, over all hyperparameters."""
        means, variances = self.marginals(np.array([number]))
        return float(means.mean()), float((variances + (means - means.mean()) ** 2).mean())

    def above(self, asked: Indices, base: int) -> tuple[Array, Array]:
        """Means and variances of how far ``asked`` lie above ``base``, each (draws, asked)."""
        one = np.array([base])
        mean, explained = self._explained(asked)
        base_mean, base_explained = self._explained(one)
        between = self._process.covariance(self._hyper, asked, one)[:, :, 0]
        prior = self._process.variance(self._hyper, asked) + self._process.variance(self._hyper, one) - 2 * between
        return mean - base_mean, np.maximum(prior - ((explained - base_explained) ** 2).sum(1), 0.0)

    def draw(self, asked: Indices, num_draws: int, generator: np.random.Generator) -> Array:
        """(num_draws, asked): joint values, in random order."""
        mean, explained = self._explained(asked)
        covariance = self._process.covariance(self._hyper, asked, asked)
        covariance = covariance - np.einsum("tia,tib->tab", explained, explained)
        size = np.einsum("taa->t", covariance)[:, None, None] / len(asked)
        roots = np.linalg.cholesky(covariance + (1e-9 * size + _JITTER) * np.eye(len(asked)))
        chosen = generator.integers(len(roots), size=num_draws)
        normal = generator.standard_normal((num_draws, len(asked)))
        drawn = mean[chosen]
        for each in np.unique(chosen):
            drawn[chosen == each] += normal[chosen == each] @ roots[each].T
        return drawn

    def _explained(self, asked: Indices) -> tuple[Array, Array]:
        """Posterior means (draws, asked), and (draws, measured, asked) whose square is the variance explained."""
        explained = self._root @ self._process.covariance(self._hyper, self._index, asked)
        mean = self._process.means(self._hyper, asked) + np.einsum("ti,tia->ta", self._solved, explained)
        return mean, explained


def _resampled(weights: Array, size: int) -> Indices:
    """Systematic resampling: each as often as its weight says, up to one."""
    shares = np.cumsum(weights / weights.sum())
    return np.minimum(np.searchsorted(shares, (np.arange(size) + 0.5) / size), len(weights) - 1)
