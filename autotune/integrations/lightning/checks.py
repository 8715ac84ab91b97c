"""Checks that a plan can be applied in a Lightning job."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from ...errors import PlanError
from ...plan import Plan
from ..checks import check_alone, even_batch

_SEE_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""Hooks of a module that find no gradients where each is freed within backward."""


def check_job(plan: Plan, trainer: Trainer, module: LightningModule) -> None:
    """
    Raises:
        PlanError: the plan cannot be applied in this job, with the reason and what to do.
    """
    check_alone(plan, trainer.world_size, "Lightning")
    even_batch(plan, "Lightning")
    reason = next(_obstacles(plan, trainer, module), None)
    if reason is not None:
        raise PlanError(reason)


def _obstacles(plan: Plan, trainer: Trainer, module: LightningModule) -> Iterator[str]:
    strategy = trainer.strategy
    if not module.automatic_optimization:
        yield (
            f"{type(module).__name__} optimizes manually, and backward, accumulation and step are its own. Set "
            "automatic_optimization = True, or apply the plan by autotune.apply_to_model and its like."
        )
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        yield (
            f"{type(strategy).__name__} cuts or moves the model by itself, which the plan was not measured with. Use "
            'Trainer(devices=1, strategy="auto").'
        )
    device = strategy.root_device.type
    if plan.budget.device not in (None, device):
        yield (
            f"budget.device: the plan is for {plan.budget.device}, but the Trainer trains on {device}. Use "
            f'Trainer(accelerator="{"gpu" if plan.budget.device == "cuda" else "cpu"}").'
        )
    yield from _of_precision(plan, trainer)
    yield from _of_step(plan, trainer, module)


def _of_precision(plan: Plan, trainer: Trainer) -> Iterator[str]:
    for name, wanted in plan.settings.options_of("Lightning").items():
        if (has := getattr(trainer, name)) != wanted:
            yield (
                f"settings.precision: the plan computes in {plan.settings.precision.kind}, but the Trainer's {name} is "
                f'"{has}". Build it by Trainer(..., **trainer_arguments(plan)).'
            )


def _of_step(plan: Plan, trainer: Trainer, module: LightningModule) -> Iterator[str]:
    freed = next((one.name for one in plan.settings.techniques() if one.frees_gradients), None)
    if freed is None:
        return
    if trainer.gradient_clip_val:
        yield f"settings.{freed}: it frees gradients before the Trainer clips them. Leave the row out."
    if seeing := [name for name in _SEE_GRADIENTS if is_overridden(name, module)]:
        yield (
            f"settings.{freed}: it frees gradients before {type(module).__name__}.{seeing[0]} could see them. Leave "
            "the row out."
        )
