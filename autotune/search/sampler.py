"""The samplers that propose configurations."""

from __future__ import annotations

import random
import warnings
from typing import Literal

import optuna

__all__ = ["build_sampler"]

_NUM_STARTUP = 6
"""Trials before the sampler's model is used; those that were not its own proposals count."""


def build_sampler(kind: Literal["tpe", "gp"], seed: int, num_trials: int) -> optuna.samplers.BaseSampler:
    """A sampler is not stored with a study: the same seed after a resume would suggest the same points again."""
    mixed = random.Random(f"{seed}:{num_trials}").getrandbits(32)
    if kind == "gp":
        import torch

        torch.set_num_threads(1)  # the fits are small, and the other threads belong to the trials
        return optuna.samplers.GPSampler(seed=mixed, n_startup_trials=_NUM_STARTUP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate
        return optuna.samplers.TPESampler(seed=mixed, n_startup_trials=_NUM_STARTUP, multivariate=True)
