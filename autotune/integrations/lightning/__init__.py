"""A plan in Lightning: arguments of its ``Trainer``, and a callback that applies the rest."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ...plan import Plan
from ...techniques import Stage

if TYPE_CHECKING:
    from .callback import PlanCallback, PlanPrecision
    from .fit import FitCallback

__all__ = ["FitCallback", "PlanCallback", "PlanPrecision", "trainer_arguments", "written"]

_HOMES = {"FitCallback": "fit", "PlanCallback": "callback", "PlanPrecision": "callback"}


def __getattr__(name: str) -> Any:
    """Import what is made of Lightning's classes as it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def trainer_arguments(plan: Plan) -> dict[str, Any]:
    """What ``lightning.pytorch.Trainer`` is to be built with, beside a :class:`PlanCallback`.

    Args:
        plan: as read by :func:`autotune.load_plan`.

    Returns:
        Keywords: ``accumulate_grad_batches``, and ``precision`` or, where that is a mixed one, ``plugins`` with a
        :class:`PlanPrecision`. What the plan leaves to the job is not among them.

    Raises:
        PlanError: Lightning cannot have the plan's batch.
    """
    from ..checks import even_batch

    arguments: dict[str, Any] = {}
    if (batch := even_batch(plan, "Lightning")) is not None:
        arguments["accumulate_grad_batches"] = batch.accumulate
    if not plan.settings.precision.has_context:
        return arguments | plan.settings.options_of("Lightning")
    from .callback import PlanPrecision

    return arguments | {"plugins": [PlanPrecision(plan)]}


def written(plan: Plan) -> str:
    """The lines to write in a Lightning job to apply a plan."""
    settings = plan.settings
    arguments = []
    if (batch := settings.batch) is not None:
        arguments.append(f"accumulate_grad_batches={batch.accumulate}")
    arguments += [f'{name}="{value}"' for name, value in settings.options_of("Lightning").items()]
    others = (one for one in settings.chosen() if one != batch and one.stage is not Stage.PROCESS)
    applied = [one.describe() for one in others if not one.options_of("Lightning")]
    if batch is not None:
        applied.insert(0, f"batches of {batch.micro}")
    comments = [
        f"trainer_arguments: {', '.join(arguments)}, in the place of yours" if arguments else "",
        "its mixed precision keeps casts of the weights within a step, which Lightning 2.6 does not"
        if settings.precision.has_context
        else "",
        f"PlanCallback: {', '.join(applied)}" if applied else "",
        f"and validation in batches of {found.batch}" if (found := plan.evaluation) and found.batch else "",
    ]
    return "\n".join(
        [
            "import autotune",
            "from autotune.integrations.lightning import PlanCallback, trainer_arguments",
            "from lightning.pytorch import Trainer",
            "",
            'plan = autotune.load_plan("plan.yaml")',
            *(f"# {comment}" for comment in comments if comment),
            "trainer = Trainer(callbacks=[PlanCallback(plan)], **trainer_arguments(plan))",
            "",
        ]
    )
