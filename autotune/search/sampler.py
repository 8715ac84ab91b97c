"""The samplers that propose configurations."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import optuna
from optuna.samplers import BaseSampler

from .options import SamplerName

__all__ = ["build_sampler"]

_NUM_STARTUP = 6
"""Trials before one of Optuna's uses its model; those that were not its own proposals count."""


def build_sampler(name: SamplerName, seed: int, num_asked: int, law: Callable[[], BaseSampler]) -> BaseSampler:
    """The sampler of that name.

    Args:
        name: ``--sampler``.
        seed: ``--seed``.
        num_asked: trials that there are. Optuna's own are not stored with a study: the same seed after a resume would
            suggest the same points again.
        law: makes this package's own.
    """
    mixed = random.Random(f"{seed}:{num_asked}").getrandbits(32)
    if name == "law":
        return law()
    if name == "random":
        return optuna.samplers.RandomSampler(seed=mixed)
    if name == "gp":
        import torch

        torch.set_num_threads(1)  # the fits are small, and the other threads belong to the trials
        return optuna.samplers.GPSampler(seed=mixed, n_startup_trials=_NUM_STARTUP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate
        return optuna.samplers.TPESampler(seed=mixed, n_startup_trials=_NUM_STARTUP, multivariate=True)
