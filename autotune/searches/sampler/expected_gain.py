"""An Optuna sampler by expected gain per second, which says when little is left to gain.

Plain Optuna::

    sampler = ExpectedGainSampler(Configurations(rows, distributions), limit_bytes=8 * 2**30)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=24, callbacks=[sampler.stop_when_settled])

where ``objective`` returns the natural logarithm of the speed, having said with ``observe`` (of ``store.observations``)
what else it saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from ..store.forecast import Forecast
from ..store.observations import Observation, corrections, observation_of, told
from .acquisition import GAIN, Acquisition
from .configurations import Configurations
from .priors import Priors
from .surrogate import Indices

EXHAUSTED = "every configuration that may be faster has been measured, or is known not to fit"
"""The reason to stop where nothing is left."""
_SETTLED = 0.05
"""Chance that anything left fits, below which there is no point in going on."""


class ExpectedGainSampler(BaseSampler):
    """Proposes the configuration with the most expected gain in speed times the chance to fit, per second of trial.

    All that it knows is in the study's trials, so that it goes on where another left off. It never proposes what was
    tried or is being tried; when nothing else is left, it proposes the best again.
    """

    def __init__(
        self,
        configurations: Configurations,
        *,
        limit_bytes: int | None = None,
        margin: float = 0.03,
        seed: int = 0,
    ) -> None:
        """Take the configurations.

        Args:
            configurations: everything that may be proposed, with what is predicted of it.
            limit_bytes: what the peak times ``1 + margin`` must not exceed; None for no limit.
            margin: share of the peak.
            seed: the same gives the same proposals.
        """
        self.configurations = configurations
        self._limit, self._margin = limit_bytes, margin
        self._seed = seed
        self._priors = Priors.of(configurations, limit_bytes)
        self._acquisition: Acquisition | None = None
        self.changed_alone = False
        """Whether only what changes the function is proposed, and counts as left."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters, known beforehand."""
        return self.configurations.distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of the most promising configuration."""
        self._raise_error_if_multi_objective(study)
        if study.direction != optuna.study.StudyDirection.MAXIMIZE:
            raise ValueError(f"direction: must be maximize, but got {study.direction.name.lower()}")
        number = self.propose(study)
        return dict(self.configurations.rows[number].params) if search_space else {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Refused: a parameter that is not among the configurations'."""
        raise ValueError(
            f"{param_name}: must be one of {', '.join(self.configurations.distributions)}, the parameters that "
            "this sampler was given configurations of."
        )

    def propose(self, study: optuna.Study) -> int:
        """Number of the most promising configuration."""
        acquisition = self.acquisition(study)
        left = self._left(acquisition)
        if len(left) == 0:
            return acquisition.best or 0
        return acquisition.propose(left)

    def believed_best(self) -> Mapping[str, Any]:
        """The parameters of the configuration that is believed fastest, before any trial, of those that are as sure as
        any to fit."""
        acquisition = Acquisition(self._priors, (), self._limit, self._margin)
        return self.configurations.rows[acquisition.expected_best].params

    def forecast(self, params: Mapping[str, Any]) -> Forecast | None:
        """What was believed of a configuration when the last proposal was made; None where it is none of them."""
        number = self.configurations.index(params)
        return None if number is None or self._acquisition is None else self._acquisition.forecast(number)

    def acquisition(self, study: optuna.Study) -> Acquisition:
        """Posterior after the study's trials; cached."""
        observed = tuple(self._observed(told(study), corrections(study)))
        if self._acquisition is None or self._acquisition.observed != observed:
            self._acquisition = Acquisition(self._priors, observed, self._limit, self._margin)
        return self._acquisition

    def promises(self, study: optuna.Study) -> Callable[[Mapping[str, Any]], float | None]:
        """By a configuration's parameters, its expected gain in the logarithm of the speed for each second of a trial,
        as things stand now; None of one that is not among the sampler's."""
        acquisition = self.acquisition(study)

        def promise(params: Mapping[str, Any]) -> float | None:
            number = self.configurations.index(params)
            return None if number is None else float(acquisition.promise()[number])

        return promise

    def stop_reason(self, study: optuna.Study) -> str | None:
        """The reason to stop, in words; None if there is none."""
        acquisition = self.acquisition(study)
        left = self._left(acquisition)
        if len(left) == 0:
            return EXHAUSTED
        done = f"stopped after {_num_measured(study)} trials"
        if acquisition.best is not None:
            gain = float(acquisition.gain[left].max())
            return f"{done}: another is expected to gain {math.expm1(gain):.1%} at most" if gain < GAIN else None
        chance = 1.0 if acquisition.may_need_less() else acquisition.chance_left(self._seed, left)
        return f"{done}: {chance:.0%} chance that anything left fits" if chance < _SETTLED else None

    def stop_when_settled(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """A callback for ``study.optimize``."""
        if self.stop_reason(study) is not None:
            study.stop()

    def _left(self, acquisition: Acquisition) -> Indices:
        left = acquisition.left
        return left[self._priors.function[left] > 0] if self.changed_alone else left

    def _observed(
        self, trials: Sequence[FrozenTrial], corrections: Mapping[str, Sequence[float]]
    ) -> Iterator[tuple[int, Observation]]:
        """Trials of known configurations; one that failed and was tried again counts as what came of it then."""
        numbered = [(self.configurations.index(trial.params), trial) for trial in trials]
        finished = {number for number, trial in numbered if trial.state == TrialState.COMPLETE}
        for number, trial in numbered:
            if number is not None and (trial.state == TrialState.COMPLETE or number not in finished):
                yield number, _corrected(observation_of(trial), *corrections.get(str(trial.number), (0.0, 0.0)))


def _num_measured(study: optuna.Study) -> int:
    """Trials that ended, of configurations that a sampler does not know of, too; one that was told of twice is one."""
    ended = (trial for trial in told(study) if trial.state.is_finished())
    return len({tuple(sorted(trial.params.items())) for trial in ended})


def _corrected(seen: Observation, shift: float, error: float) -> Observation:
    if seen.log_speed is None or shift == error == 0:
        return seen
    return replace(seen, log_speed=seen.log_speed + shift, relative_error=math.hypot(seen.relative_error, error))
