"""Competitors that are Optuna samplers, told what this package tells them; and its own sampler without some of it."""

from __future__ import annotations

import random
import statistics
import warnings
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from autotune.searches.sampler.candidates import build_sampler
from autotune.searches.sampler.configurations import Configurations
from autotune.searches.sampler.expected_gain import ExpectedGainSampler
from autotune.searches.sampler.priors import Priors
from autotune.searches.store.observations import correct, observe
from autotune.searches.verdict import CONSTRAINTS, Verdict, observation
from autotune.techniques import Settings

from .gains import stated_gains
from .problem import Gains, Problem, Result, Space

_NUM_AGAIN = 2
"""How often the best is measured again: as a finalist, and in a fresh process."""
_PATIENCE = 5
"""Proposals in a row that were measured before, until one is drawn from what is left."""


def expected_gain(
    is_derived: bool = True, gains: Callable[[Problem], Gains] = stated_gains
) -> Callable[[Problem, int], Generator[Settings, Result, str | None]]:
    """This package's own, which also stops by itself.

    Args:
        is_derived: over what may be of use and batches about the largest predicted to fit, as in a search; else over
            everything.
        gains: what is believed of techniques beforehand.
    """

    def play(problem: Problem, seed: int) -> Generator[Settings, Result, str | None]:
        known = Space.raw(problem)
        limit, margin = problem.budget.limit, problem.budget.margin
        configurations = _configurations(known, problem, is_derived, gains(problem))
        sampler = ExpectedGainSampler(configurations, limit_bytes=limit, margin=margin, seed=seed)
        study = _study(sampler)
        while True:
            while (reason := sampler.stop_reason(study)) is None:
                trial = study.ask(known.distributions)
                settings = known.settings(trial.params)
                assert settings is not None
                _observe(study, trial, (yield settings))
            best = sampler.acquisition(study).best
            if best is None:
                return reason
            params = configurations.rows[best].params
            fell = yield from _fell(known.settings(params))
            if fell is None:
                return reason
            study.enqueue_trial(dict(params))
            _observe(study, study.ask(known.distributions), fell)

    return play


def _observe(study: optuna.Study, trial: optuna.Trial, result: Result) -> None:
    observe(trial, observation(result.outcome, result.verdict))
    study.tell(trial, result.verdict.log_speed or 0.0)
    correct(study, {number: (one.shift, one.error) for number, one in result.corrections.items()})


def _fell(best: Settings | None) -> Generator[Settings, Result, Result | None]:
    """The best is measured again, as a search does before it ends; what showed that it cannot be used, if so."""
    assert best is not None
    for _ in range(_NUM_AGAIN):
        result = yield best
        if not result.verdict.feasible:
            return result
    return None


def prior_alone(problem: Problem, seed: int) -> Generator[Settings, Result, str | None]:
    """The same without learning anything: what is predicted to fit, by the speed that is believed before any trial, the
    fastest first; then what is not. It never stops by itself."""
    known = Space.raw(problem)
    configurations = _configurations(known, problem, True, stated_gains(problem))
    speeds = Priors.of(configurations, problem.budget.limit).speed.mean
    ranked = [known.settings(configurations.rows[number].params) for number in np.argsort(-speeds, kind="stable")]
    foreseen = sorted(filter(None, ranked), key=lambda settings: not problem.predicted_to_fit(settings))
    for settings in foreseen:  # noqa: UP028 - what a list yields from cannot be sent a result
        yield settings
    return None


def _configurations(space: Space, problem: Problem, is_derived: bool, gains: Gains) -> Configurations:
    found = space.configurations(problem, not is_derived, gains)
    limit = problem.budget.limit
    return found.derived(limit / (1 + problem.budget.margin)) if is_derived and limit is not None else found


def optuna_sampler(
    kind: Any, space: Callable[[Problem], Space]
) -> Callable[[Problem, int], Generator[Settings, Result, str | None]]:
    """One of Optuna's, told of constraints as the driver tells them; it is not charged for repeating itself."""

    def play(problem: Problem, seed: int) -> Generator[Settings, Result, str | None]:
        known, chooser = space(problem), random.Random(seed)
        study, results = _study(build_sampler(kind, seed, 0)), dict[Settings, Result]()
        everything = list(dict.fromkeys(known.by_params.values()))
        while len(results) < len(everything):
            for _ in range(_PATIENCE, -1, -1):
                trial, settings = _ask(study, known, None)
                if settings is None or settings in results:
                    _tell(study, trial, results.get(settings) if settings else None, results)
                    continue
                break
            else:
                left = [each for each in everything if each not in results]
                trial, settings = _ask(study, known, chooser.choice(left))
            assert settings is not None
            results[settings] = yield settings
            _tell(study, trial, results[settings], results)
        return None

    return play


def _study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    return optuna.create_study(direction="maximize", sampler=sampler)


def _ask(study: optuna.Study, space: Space, wanted: Settings | None) -> tuple[optuna.Trial, Settings | None]:
    if wanted is not None:
        study.enqueue_trial(space.params(wanted))
    trial = study.ask(dict(space.distributions))
    return trial, space.settings(trial.params)


def _tell(study: optuna.Study, trial: optuna.Trial, result: Result | None, results: dict[Settings, Result]) -> None:
    """As :class:`autotune.searches.store.study.Study` does: a value stands in where there is none."""
    if result is None:
        study.tell(trial, state=TrialState.FAIL)
        return
    verdict: Verdict = result.verdict
    for key, value in zip(CONSTRAINTS, verdict.constraints, strict=True):
        trial.set_constraint(key, value)
    known = [row.verdict.log_speed for row in results.values() if row.verdict.log_speed is not None]
    imputed = statistics.median(known) if known else 0.0
    study.tell(trial, imputed if verdict.log_speed is None else verdict.log_speed)


optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
