"""What to measure next, and what is left to gain: expected improvement under a limit, from surrogates of each quantity.

Sources: Jones, Schonlau, Welch 1998 (expected improvement); Gardner et al. 2014 (times the chance to be feasible);
Snoek, Larochelle, Adams 2012, arXiv:1206.2944, 3.2 (per second).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from scipy.special import ndtr

from ..store.forecast import Forecast, Range
from ..store.observations import Observation
from .priors import Priors
from .surrogate import Array, Indices, Posterior, Surrogate

GAIN = math.log(1.01)
"""Logarithm of the least gain in speed that is worth another trial."""

_SURE = 0.9
"""Share of the highest chance to be used from which on a configuration is as sure as any."""
_FAILS = 0.5
"""A configuration is taken to fail where its score, 1 for failure and 0 for none, is above."""
_LIKELY = 0.5
"""Chance to be of sufficient quality from which on a configuration may be the best: what is likelier to fall in the end
must not keep others from being tried."""
_OVER_COSTS = 20.0
"""Cost multiplier of a trial that is over the budget or fails."""
_MOST_DRAWN = 96
"""Configurations in a joint draw: the most promising."""
_NUM_DRAWS = 512
"""Joint draws that a chance is counted in: 5 % is within 1 %."""
_RIDGE = 0.3
"""Weight of the guess that a trial is half fixed and half proportional to the time of a sample, in trials."""
_TINY = 1e-12
_ALLOWED = math.asinh(1.0)
"""The allowed drop, as the surrogate of quality has it."""


class Acquisition:
    """Posterior after some trials, and the expected gain of a further one."""

    def __init__(
        self,
        priors: Priors,
        observed: Sequence[tuple[int, Observation]],
        limit_bytes: float | None,
        margin: float = 0.0,
    ) -> None:
        """Learn from trials.

        Args:
            priors: what was believed before.
            observed: the number of a configuration, and what a trial of it showed.
            limit_bytes: what a peak times ``1 + margin`` must not exceed; None where nothing is held to a limit.
            margin: share of the peak. A trial within it cannot be used, but does no harm.
        """
        self.observed = tuple(observed)
        self._priors = priors
        self._log_margin = math.log1p(margin)
        self._log_limit = None if limit_bytes is None else math.log(limit_bytes) - self._log_margin
        self.speed = self._learn(priors.speed, [(n, one.log_speed, one.relative_error) for n, one in self.observed])
        self.peak = None if limit_bytes is None else self._learn_peak()
        self.failure = self._learn_failure()
        self.quality = self._learn_quality()
        """Over functions; None where none but the reference's can be chosen."""
        self.best = self._find_best()
        """The configuration that is fastest by what is believed, among those that were measured and fit; or None."""

    @cached_property
    def left(self) -> Indices:
        """Configurations that were not tried and are not being tried."""
        return np.setdiff1d(np.arange(len(self.speed.mean)), [number for number, _ in self.observed])

    @cached_property
    def chance_usable(self) -> Array:
        """(configurations,): chance that a trial runs, is within the limit with its margin, and is good enough."""
        return self._chance(0.0) * self.chance_kept

    @cached_property
    def chance_kept(self) -> Array:
        """(configurations,): chance that the quality is within the allowed drop."""
        if self.quality is None:
            return np.ones(len(self._priors.function))
        chance = ndtr((_ALLOWED - self.quality.mean) / np.sqrt(self.quality.variance + _TINY))
        chance[self._dropped] = 0.0
        return np.asarray(chance[self._priors.function])

    def forecast(self, number: int) -> Forecast:
        """What a measurement of a configuration is expected to show."""
        peak = None
        if self.peak is not None:
            mean = float(self.peak.mean[number] + self._priors.log_predicted[number])
            peak = Range.of(mean, float(self.peak.variance[number]) + self.peak.noise_variance)
        speed = Range.of(float(self.speed.mean[number]), float(self.speed.variance[number]) + self.speed.noise_variance)
        return Forecast(samples_per_s=speed, peak_bytes=peak)

    def propose(self, left: Indices) -> int:
        """The most promising of what is left. As long as nothing that was measured can be used, and nothing left is
        expected to gain :data:`GAIN` over what is taken for the best: that one.

        Args:
            left: at least one.
        """
        if self.best is None and self.expected_best in left and self.gain[left].max() < GAIN:
            return self.expected_best
        return int(left[np.argmax(self.promise()[left])])

    def promise(self) -> Array:
        """(configurations,): expected gain in speed, if it can be used, over the cost."""
        harmless = self._chance(self._log_margin)
        cost = self._expected_seconds() * (1 + _OVER_COSTS * (1 - harmless))
        return np.asarray(self.gain / cost)

    @cached_property
    def gain(self) -> Array:
        """(configurations,): expected gain in speed over the best, as a logarithm, times the chance that it can be
        used."""
        mean, deviation = self._above_best
        z = mean / deviation
        gain = np.maximum(mean * ndtr(z) + deviation * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi), 0.0)
        return np.asarray(gain * self.chance_usable)

    def chance_left(self, seed: int, left: Indices | None = None) -> float:
        """That anything left can be used, by joint draws from all that is believed, of the most likely that are left.

        Args:
            seed: of the draws.
            left: what counts as left; None is all that is.
        """
        left = self.left if left is None else left
        asked = left[np.argsort(-self.chance_usable[left], kind="stable")[:_MOST_DRAWN]]
        if len(asked) == 0:
            return 0.0
        generator = np.random.default_rng(seed)
        usable = np.ones((_NUM_DRAWS, len(asked)), dtype=bool)
        if self.peak is not None:
            noise = math.sqrt(self.peak.noise_variance) * generator.standard_normal(usable.shape)
            usable &= _draw(self.peak, asked, generator) + noise <= self._room[asked]
        if self.failure is not None:
            usable &= _draw(self.failure, asked, generator) <= _FAILS
        if self.quality is not None:
            functions, of_each = np.unique(self._priors.function[asked], return_inverse=True)
            kept = _draw(self.quality, functions, generator) <= _ALLOWED
            usable &= (kept & ~np.isin(functions, self._dropped))[:, of_each]
        return float(usable.any(1).mean())

    def may_need_less(self) -> bool:
        """Whether anything left is expected to need less memory than everything that was tried."""
        return self.peak is not None and bool(np.argmin(self.peak.mean + self._priors.log_predicted) in self.left)

    def _chance(self, more_room: float) -> Array:
        """(configurations,): that a trial does not fail, and fits the limit with ``more_room`` added to its
        logarithm."""
        chance = np.ones(len(self.speed.mean))
        if self.peak is not None:
            room = self._room + more_room - self.peak.mean
            chance = ndtr(room / np.sqrt(self.peak.variance + self.peak.noise_variance))
        if self.failure is not None:
            chance = chance * ndtr((_FAILS - self.failure.mean) / np.sqrt(self.failure.variance + _TINY))
        return np.asarray(chance)

    @cached_property
    def _above_best(self) -> tuple[Array, Array]:
        """(configurations,): mean and standard deviation of how much faster than the best, in logarithms."""
        best = self.expected_best
        between = self.speed.covariance(np.arange(len(self.speed.mean)), np.array([best]))[:, 0]
        variance = self.speed.variance + self.speed.variance[best] - 2 * between
        return self.speed.mean - self.speed.mean[best], np.sqrt(np.maximum(variance, _TINY))

    @cached_property
    def expected_best(self) -> int:
        """The best. As long as nothing that was measured can be used, the fastest of those that are as sure as any to
        be: the next trial would bring that one."""
        if self.best is not None:
            return self.best
        sure = np.flatnonzero(self.chance_usable >= _SURE * self.chance_usable.max())
        return int(sure[np.argmax(self.speed.mean[sure])])

    @property
    def _room(self) -> Array:
        """(configurations,): logarithm of how far the measured peak may exceed the predicted one."""
        assert self._log_limit is not None
        return self._log_limit - self._priors.log_predicted

    def _learn_peak(self) -> Posterior:
        """What ran out of memory counts as what was seen then, or as expected where that is more."""
        rows: list[tuple[int, float, float]] = []
        bounds: list[tuple[int, float]] = []
        for number, seen in self.observed:
            if seen.peak_bytes is not None:
                ratio = math.log(seen.peak_bytes) - self._priors.log_predicted[number]
                if seen.outcome == "measured":
                    rows.append((number, ratio, 0.0))
                elif seen.outcome == "out of memory":
                    bounds.append((number, ratio))
        if bounds:
            expected = self._learn(self._priors.peak, rows).mean
            rows += [(number, max(bound, float(expected[number])), 0.0) for number, bound in bounds]
        return self._learn(self._priors.peak, rows)

    def _learn_failure(self) -> Posterior | None:
        """None as long as nothing has failed."""
        if all(seen.outcome != "failed" for _, seen in self.observed):
            return None
        known = [(n, float(seen.outcome == "failed"), 0.0) for n, seen in self.observed if seen.outcome != "running"]
        return self._learn(self._priors.failure, known)

    def _learn_quality(self) -> Posterior | None:
        """What was judged tells of all that computes the same, and of what takes away more or less. No part of a model
        is gone for its good: what looks better than the reference has lost nothing."""
        if len(self._priors.quality.mean) == 1:
            return None
        function = self._priors.function
        rows = [
            (int(function[n]), math.asinh(max(seen.lost, 0.0)), seen.lost_error / math.hypot(1.0, seen.lost))
            for n, seen in self.observed
            if seen.lost is not None
        ]
        return _posterior(self._priors.quality, rows)

    @property
    def _dropped(self) -> Indices:
        """Functions that were found to be of too low a quality."""
        return self._priors.function[[n for n, seen in self.observed if seen.outcome == "dropped"]]

    def _learn(self, prior: Surrogate, rows: Sequence[tuple[int, float | None, float]]) -> Posterior:
        """From (number, value, standard error); what is running is taken to be as it is expected to be."""
        known = [row for row in rows if row[1] is not None]
        posterior = _posterior(prior, known)
        running = [number for number, seen in self.observed if seen.outcome == "running"]
        if not running:
            return posterior
        return _posterior(prior, [*known, *((number, float(posterior.mean[number]), 0.0) for number in running)])

    def _find_best(self) -> int | None:
        fits = {number: True for number, seen in self.observed if seen.outcome == "measured"}
        for number, seen in self.observed:
            over = self._log_limit is not None and math.log(seen.peak_bytes or 1) > self._log_limit
            if number in fits and ((over and not seen.fits) or seen.outcome in ("failed", "dropped", "out of memory")):
                fits[number] = False
        likely = self.chance_kept >= _LIKELY
        usable = np.array([number for number, yes in fits.items() if yes and likely[number]], dtype=np.intp)
        return int(usable[np.argmax(self.speed.mean[usable])]) if len(usable) else None

    def _expected_seconds(self) -> Array:
        """(configurations,): of a trial: some, and a number of samples at its speed; what cannot be used ends early."""
        rows = [
            (seen.log_speed, seen.seconds) for _, seen in self.observed if seen.log_speed is not None and seen.seconds
        ]
        if not rows:
            return np.ones(len(self.speed.mean))
        per_sample, seconds = np.exp(-np.array([row[0] for row in rows])), np.array([row[1] for row in rows])
        scale = per_sample.mean()
        design = np.vstack([np.column_stack([np.ones(len(rows)), per_sample / scale]), np.eye(2) * _RIDGE])
        wanted = np.append(seconds, [_RIDGE * seconds.mean() / 2] * 2)
        fixed, growing = np.maximum(np.linalg.lstsq(design, wanted, rcond=None)[0], 1e-3 * seconds.mean())
        return np.asarray(fixed + self.chance_usable * growing * np.exp(-self.speed.mean) / scale)


def _posterior(prior: Surrogate, rows: Sequence[tuple[int, float | None, float]]) -> Posterior:
    number, value, error = zip(*rows, strict=True) if rows else ((), (), ())
    return Posterior(prior, np.array(number, dtype=np.intp), np.array(value, dtype=float), np.array(error, dtype=float))


def _draw(posterior: Posterior, asked: Indices, generator: np.random.Generator) -> Array:
    """(draws, asked)."""
    covariance = posterior.covariance(asked, asked)
    jitter = 1e-9 * np.trace(covariance) / len(asked) + 1e-10
    root = np.linalg.cholesky(covariance + jitter * np.eye(len(asked)))
    drawn: Array = posterior.mean[asked] + generator.standard_normal((_NUM_DRAWS, len(asked))) @ root.T
    return drawn
