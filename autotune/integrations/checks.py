"""What every integration asks before it applies a plan."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from ..errors import PlanError
from ..fingerprint import identify
from ..plan import Plan
from ..techniques.facts import difference

__all__ = ["check_model", "described", "warn_of_version"]


@functools.cache
def warn_of_version(framework: str, version: str, tried: str) -> None:
    """Warn, once, of a framework whose major and minor version is not the one that was tried."""
    if version.split(".")[:2] != tried.split("."):
        warnings.warn(
            f"plans were tried with {framework} {tried}, and this is {version}. Compare the losses of a few steps with "
            f"autotune.apply's, or install {tried}.",
            stacklevel=4,
        )


def check_model(plan: Plan, model: nn.Module, blocks: Sequence[str], instead: str) -> None:
    """
    Args:
        plan: as read by :func:`autotune.load_plan`.
        model: before any technique.
        blocks: as the task had them.
        instead: what to do.

    Raises:
        PlanError: the plan was found for another model.
    """
    known = plan.task.identity if plan.task is not None else None
    if known is None:
        return
    _, found = identify(model, (), blocks=blocks)
    if (found.model, found.names) != (known.model, known.names):
        differs = difference(known, found.model_copy(update={"batch": known.batch}))
        raise PlanError(
            f"task.identity: the plan was found for another model than this {type(model).__name__}: {differs}. "
            f"{instead}."
        )


def described(plan: Plan, *notes: str) -> str:
    """What is in force of a plan, and what is not, in a line."""
    chosen = list(plan.settings.chosen())
    lacking = {one.name: reason for one in chosen if (reason := one.not_in_force())}
    words = [one.describe() for one in chosen if one.name not in lacking]
    parts = [f"in force: {', '.join(words) or 'nothing but the job as it is'}"]
    if lacking:
        parts.append(f"not in force: {', '.join(f'{name} ({reason})' for name, reason in lacking.items())}")
    if plan.environment is not None and plan.environment.torch != torch.__version__:
        parts.append(f"measured with torch {plan.environment.torch}, and this is {torch.__version__}")
    return "; ".join([*parts, *notes])
