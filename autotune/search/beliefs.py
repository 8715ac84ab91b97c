"""What a search believes of each configuration, measured or not: its speed, whether it fits, a trial's duration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .normal import at_least, expected_improvement, normal_cdf
from .priors import Priors
from .process import Array, Indices, Posterior, Process

__all__ = ["GAIN", "Beliefs", "Observation"]

GAIN = math.log(1.01)
"""Logarithm of the least gain in speed that is worth another trial."""

_FAILS = 0.5
"""A configuration is taken to fail where its score, 1 for failure and 0 for none, is above."""
_OVER_COSTS = 20.0
"""A trial over the budget, or that fails, counts as so many: one in twenty is let be."""
_MOST_DRAWN = 96
"""Configurations in a joint draw: the most promising."""
_NUM_DRAWS = 1024
"""Joint draws that a chance is counted in: 5 % is within 0.7 %."""
_RIDGE = 0.3
"""Weight of the guess that a trial is half fixed and half proportional to the time of a sample, in trials."""
_TINY = 1e-12


@dataclass(frozen=True)
class Observation:
    """What a trial showed."""

    outcome: Literal["measured", "out of memory", "failed", "running"]
    """``failed``: for any other reason than memory."""
    log_speed: float | None = None
    """Natural logarithm of samples per second."""
    relative_error: float = 0.0
    """Standard error of the speed as the measurement states it, as a share."""
    peak_bytes: int | None = None
    """Peak memory; of ``out of memory`` a lower bound."""
    seconds: float | None = None
    """The trial's whole duration."""


class Beliefs:
    """What is believed after some trials."""

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
        self.priors = priors
        self.observed = tuple(observed)
        self._log_margin = math.log1p(margin)
        self._log_limit = None if limit_bytes is None else math.log(limit_bytes) - self._log_margin
        self._everything = np.arange(len(priors.configurations))
        self.speed = self._learn_speed()
        self.peak = None if limit_bytes is None else self._learn_peak()
        self.failure = self._learn_failure()
        self.best = self._find_best()
        """The configuration that is fastest by what is believed, among those that were measured and fit; or None."""

    @property
    def left(self) -> Indices:
        """Configurations that were not tried and are not being tried."""
        return np.setdiff1d(self._everything, [number for number, _ in self.observed])

    def promise(self, asked: Indices) -> Array:
        """(asked,): expected gain in speed over the best, times the chance that it can be used, per second of trial.

        Source: Jones, Schonlau, Welch 1998 (expected improvement); Snoek, Larochelle, Adams 2012, arXiv:1206.2944, 3.2
        (per second); Gardner et al. 2014 (times the chance to be feasible).
        """
        chance = self.chance_usable(asked)
        if self.best is None:
            expected = self.speed.marginals(asked)[0].mean(0)
            gain = expected - expected.min() + 1.0
        else:
            mean, variance = self.speed.above(asked, self.best)
            expected = mean.mean(0) + self.speed.overall(self.best)[0]
            gain = expected_improvement(mean, np.sqrt(variance)).mean(0)
        harmless = self.chance_usable(asked, self._log_margin)
        cost = self._expected_seconds(expected, chance) * (1 + _OVER_COSTS * (1 - harmless))
        return np.asarray(gain * chance / cost)

    def chance_usable(self, asked: Indices, more_room: float = 0.0) -> Array:
        """(asked,): that a trial does not fail, and fits the limit with ``more_room`` added to its logarithm."""
        chance = np.ones(len(asked))
        if self.peak is not None:
            mean, variance = self.peak.marginals(asked)
            room = self._room(asked) + more_room - mean
            chance = normal_cdf(room / np.sqrt(variance + self.peak.noise_variance[:, None])).mean(0)
        if self.failure is not None:
            mean, variance = self.failure.marginals(asked)
            chance = chance * normal_cdf((_FAILS - mean) / np.sqrt(variance + _TINY)).mean(0)
        return np.asarray(chance)

    def chance_left(self, seed: int) -> float:
        """That anything left can be used and is more than :data:`GAIN` faster than the best; or, where nothing that
        was measured can be used, that anything left can be.

        By joint draws from all that is believed, of the most promising that are left.
        """
        asked = self._most_promising()
        if len(asked) == 0:
            return 0.0
        generator = np.random.default_rng(seed)
        drawn = self._draw_usable(asked, generator)
        if self.best is not None:
            speeds = self.speed.draw(np.append(asked, self.best), _NUM_DRAWS, generator)
            drawn &= speeds[:, :-1] > speeds[:, -1:] + GAIN
        return float(drawn.any(1).mean())

    def may_need_less(self) -> bool:
        """Whether anything left is expected to need less memory than everything that was tried."""
        if self.peak is None:
            return False
        peaks = self.peak.marginals(self._everything)[0].mean(0) + self.priors.log_predicted
        return bool(np.argmin(peaks) in self.left)

    def _most_promising(self) -> Indices:
        """Of what is left, the most likely to be usable and faster."""
        left = self.left
        chance = self.chance_usable(left)
        if self.best is not None:
            mean, variance = self.speed.above(left, self.best)
            chance = chance * normal_cdf((mean - GAIN) / np.sqrt(variance + _TINY)).mean(0)
        return left[np.argsort(-chance, kind="stable")[:_MOST_DRAWN]]

    def _draw_usable(self, asked: Indices, generator: np.random.Generator) -> NDArray[np.bool_]:
        """(draws, asked): whether each fits the limit and does not fail."""
        usable = np.ones((_NUM_DRAWS, len(asked)), dtype=bool)
        if self.peak is not None:
            noise = math.sqrt(self.peak.noise_variance.mean()) * generator.standard_normal(usable.shape)
            usable &= self.peak.draw(asked, _NUM_DRAWS, generator) + noise <= self._room(asked)
        if self.failure is not None:
            usable &= self.failure.draw(asked, _NUM_DRAWS, generator) <= _FAILS
        return usable

    def _room(self, asked: Indices) -> Array:
        """(asked,): logarithm of how far the measured peak may exceed the predicted one."""
        assert self._log_limit is not None
        return self._log_limit - self.priors.log_predicted[asked]

    def _learn_speed(self) -> Posterior:
        seen = [(number, each.log_speed, each.relative_error) for number, each in self.observed]
        return self._learn(self.priors.speed, [(n, speed, error) for n, speed, error in seen if speed is not None])

    def _learn_peak(self) -> Posterior:
        """What ran out of memory would have had a peak above the one that was seen: a measurement with the mean and
        the variance that the bound leaves of what the others say."""
        exact: list[tuple[int, float, float]] = []
        least: list[tuple[int, float, float]] = []
        for number, seen in self.observed:
            if seen.peak_bytes is not None and seen.outcome in ("measured", "out of memory"):
                ratio = math.log(seen.peak_bytes) - self.priors.log_predicted[number]
                (exact if seen.outcome == "measured" else least).append((number, ratio, 0.0))
        if least:
            believed = self._learn(self.priors.peak, exact)
            exact += [(number, *at_least(bound, *believed.overall(number))) for number, bound, _ in least]
        return self._learn(self.priors.peak, exact)

    def _learn_failure(self) -> Posterior | None:
        """None as long as nothing has failed."""
        if all(seen.outcome != "failed" for _, seen in self.observed):
            return None
        scores = [(number, float(seen.outcome == "failed"), 0.0) for number, seen in self.observed]
        known = [row for row, (_, seen) in zip(scores, self.observed, strict=True) if seen.outcome != "running"]
        return self._learn(self.priors.failure, known)

    def _learn(self, process: Process, rows: Sequence[tuple[int, float, float]]) -> Posterior:
        """From (number, value, standard error); what is running is taken to be as it is expected to be."""
        posterior = process.given(*_columns(rows))
        running = np.array([number for number, seen in self.observed if seen.outcome == "running"], dtype=np.intp)
        if len(running) == 0:
            return posterior
        expected = posterior.marginals(running)[0].mean(0)
        return process.given(*_columns([*rows, *((n, v, 0.0) for n, v in zip(running, expected, strict=True))]))

    def _find_best(self) -> int | None:
        fits = {number: True for number, seen in self.observed if seen.outcome == "measured"}
        for number, seen in self.observed:
            over = self._log_limit is not None and math.log(seen.peak_bytes or 1) > self._log_limit
            if number in fits and (over or seen.outcome in ("failed", "out of memory")):
                fits[number] = False
        usable = np.array([number for number, yes in fits.items() if yes], dtype=np.intp)
        if len(usable) == 0:
            return None
        return int(usable[np.argmax(self.speed.marginals(usable)[0].mean(0))])

    def _expected_seconds(self, log_speed: Array, chance: Array) -> Array:
        """(asked,): of a trial: some, and a number of samples at its speed; what cannot be used ends early."""
        rows = [
            (seen.log_speed, seen.seconds) for _, seen in self.observed if seen.log_speed is not None and seen.seconds
        ]
        if not rows:
            return np.ones(len(log_speed))
        per_sample, seconds = np.exp(-np.array([row[0] for row in rows])), np.array([row[1] for row in rows])
        scale = per_sample.mean()
        design = np.vstack([np.column_stack([np.ones(len(rows)), per_sample / scale]), np.eye(2) * _RIDGE])
        wanted = np.append(seconds, [_RIDGE * seconds.mean() / 2] * 2)
        fixed, growing = np.maximum(np.linalg.lstsq(design, wanted, rcond=None)[0], 1e-3 * seconds.mean())
        return np.asarray(fixed + chance * growing * np.exp(-log_speed) / scale)


def _columns(rows: Sequence[tuple[int, float, float]]) -> tuple[Indices, Array, Array]:
    """Numbers, values and variances."""
    number, value, error = zip(*rows, strict=True) if rows else ((), (), ())
    return np.array(number, dtype=np.intp), np.array(value, dtype=float), np.array(error, dtype=float) ** 2
