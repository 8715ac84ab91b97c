"""Optuna's own samplers, as they are used here."""

from __future__ import annotations

import random
import warnings
from typing import Literal

import optuna
from optuna.samplers import BaseSampler

_NUM_STARTUP = 6
"""Trials before a sampler's model is used; those that were not its own proposals count."""


def build_sampler(name: Literal["tpe", "gp", "random"], seed: int, num_asked: int) -> BaseSampler:
    """One of Optuna's samplers.

    It is not stored with a study, and the same seed after a resume would suggest the same points again: so the number
    of trials that there are goes into it.
    """
    mixed = random.Random(f"{seed}:{num_asked}").getrandbits(32)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=mixed)
    if name == "gp":
        import torch

        torch.set_num_threads(1)  # the fits are small, and the other threads belong to the trials
        return optuna.samplers.GPSampler(seed=mixed, n_startup_trials=_NUM_STARTUP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate
        return optuna.samplers.TPESampler(seed=mixed, n_startup_trials=_NUM_STARTUP, multivariate=True)
