"""The environment that a trial starts with, built explicitly: what a job would see, and what its plan needs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...ranks import RANK_VARIABLES
from ..request import TrialRequest

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""How many threads a process computes with."""

_NOT_A_TRIALS = ("RAY_", "TORCHELASTIC_")


def trial_environment(request: TrialRequest, base: Mapping[str, str]) -> dict[str, str]:
    """Variables of a trial's process.

    Args:
        request: its own variables come last; its plan's are joined to them as to a job's.
        base: what the process that starts trials has; Ray's own variables are left out, and a rank's: a trial has no
            others to wait for.

    Raises:
        PlanError: the plan needs an allocator that is not installed here, or what the variables forbid.
    """
    kept = {
        name: value for name, value in base.items() if not name.startswith(_NOT_A_TRIALS) and name not in RANK_VARIABLES
    }
    own = {**kept, **request.environment}
    return {**own, **request.applied.environment(own)}


def own_thread_variables() -> dict[str, str]:
    """This process's thread variables: what a driver hands on to trials that start elsewhere."""
    return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
