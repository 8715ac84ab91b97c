"""What trials showed, kept with them in Optuna's study: a sampler that goes by it goes on where another left off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import optuna
from optuna.trial import FrozenTrial, TrialState

from .forecast import Forecast

_OBSERVATION = "observation"
"""The user attribute that holds what a trial showed."""
_WITHDRAWN = "withdrawn"
"""The user attribute of a trial that was never run."""
_FORGOTTEN = "forgotten"
"""The study's user attribute with the numbers of trials that were taken back: those that ended cannot be changed."""
_CORRECTIONS = "corrections"
"""The study's user attribute with what is added to trials' speeds: those that ended cannot be changed."""


@dataclass(frozen=True)
class Observation:
    """What a trial showed."""

    outcome: Literal["measured", "out of memory", "dropped", "failed", "running"]
    """``dropped``: its quality is too low. ``failed``: for any other reason than that and memory."""
    log_speed: float | None = None
    """Natural logarithm of samples per second."""
    relative_error: float = 0.0
    """Standard error of the speed as the measurement states it, as a share."""
    peak_bytes: int | None = None
    """Peak memory; of ``out of memory`` a lower bound."""
    seconds: float | None = None
    """The trial's whole duration."""
    lost: float | None = None
    """Drop in quality over the allowed one, below 0 where it is better than the reference's; None where it was not
    judged."""
    lost_error: float = 0.0
    """Standard error of that, as the evaluation states it."""
    fits: bool = False
    """Whether it is known to fit whatever its peak: the job as it stands may be admitted as it is."""


@runtime_checkable
class Foreseeing(Protocol):
    """A sampler that says what it expects of a configuration, and when it would stop."""

    def forecast(self, params: Mapping[str, Any]) -> Forecast | None:
        """What was believed of a configuration when the last proposal was made; None where it is none of its own."""

    def promises(self, study: optuna.Study) -> Callable[[Mapping[str, Any]], float | None]:
        """By a configuration's parameters, its expected gain in the logarithm of the speed for each second of a trial,
        as things stand now; None of one that is none of its own."""

    def stop_reason(self, study: optuna.Study) -> str | None:
        """The reason to stop, in words; None if there is none."""


def observe(trial: optuna.Trial, observation: Observation) -> None:
    """Keep what a trial showed with it, for such a sampler; before its end."""
    trial.set_user_attr(_OBSERVATION, asdict(observation))


def withdraw(trial: optuna.Trial) -> None:
    """Mark a trial that was never run: it says nothing of its configuration, which may be proposed again."""
    trial.set_user_attr(_WITHDRAWN, True)


def forget(study: optuna.Study, numbers: Iterable[int]) -> None:
    """Take back trials that were told: they say nothing of their configurations, which may be proposed again."""
    study.set_user_attr(_FORGOTTEN, sorted(forgotten(study).union(numbers)))


def forgotten(study: optuna.Study) -> frozenset[int]:
    """Numbers of the trials that were taken back."""
    return frozenset(study.user_attrs.get(_FORGOTTEN, ()))


def correct(study: optuna.Study, corrections: Mapping[int, tuple[float, float]]) -> None:
    """Say what is added to the logarithm of speeds that trials showed, and the standard error of that, by the trials'
    numbers: later measurements tell how busy the machine was. It takes the place of what was said before."""
    study.set_user_attr(_CORRECTIONS, {str(number): list(row) for number, row in corrections.items()})


def corrections(study: optuna.Study) -> Mapping[str, Sequence[float]]:
    """What :func:`correct` said last, by the trials' numbers as text."""
    found: Mapping[str, Sequence[float]] = study.user_attrs.get(_CORRECTIONS, {})
    return found


def told(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that say something of their configurations, or will."""
    left_out = forgotten(study)
    trials = study.get_trials(deepcopy=False)
    return [trial for trial in trials if _WITHDRAWN not in trial.user_attrs and trial.number not in left_out]


def observation_of(trial: FrozenTrial) -> Observation:
    """What a trial showed: as :func:`observe` kept it, or by its state and value."""
    if trial.state != TrialState.COMPLETE:
        return Observation("failed" if trial.state.is_finished() else "running")
    if _OBSERVATION in trial.user_attrs:
        return Observation(**trial.user_attrs[_OBSERVATION])
    return Observation("measured", trial.value, seconds=trial.duration.total_seconds() if trial.duration else None)
