"""A plan in an Accelerate loop: keyword arguments of the ``Accelerator``, and a step before its ``prepare``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..errors import PlanError
from ..plan import Plan
from ..randomness import undisturbed
from ..techniques.support.base import Run
from ..training.apply_pieces import apply_to_model, apply_to_optimizer, on_two_samples
from ..training.data_loader import changed_loader
from .checks import check_model, check_version, even_batch, of_one_rank, refuse_other_models, tell
from .loaders import put_at_first_epoch

_PLAN = "_autotune_plan"
"""On a loader that :func:`prepare` returned."""
_OWN = "_autotune_own"
"""On an Accelerator that a plan was put on: its :class:`_Own`."""


class _Own(NamedTuple):
    """An Accelerator's methods before a plan was put around them."""

    prepare_data_loader: Callable[..., Any]
    autocast: Callable[..., Any]


def arguments(plan: Plan) -> dict[str, Any]:
    """The keyword arguments of a plan, for ``Accelerator(**arguments(plan))``.

    Raises:
        PlanError: the plan is in uneven micro-batches.
    """
    given: dict[str, Any] = {}
    if (batch := even_batch(plan, "an Accelerator")) is not None:
        given["gradient_accumulation_steps"] = batch.accumulate
    return given | plan.settings.options_of("Accelerator")


def prepare(
    plan: Plan,
    accelerator: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    blocks: tuple[str, ...] = (),
    max_grad_norm: float | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Put a plan on what ``accelerator.prepare`` is about to be given. What an earlier plan put there is taken off.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        accelerator: built with :func:`arguments`.
        model: as it was built.
        optimizer: of its parameters.
        loader: for training; its dataset, order and collation stay.
        loss: (model, batch) -> loss, by which memory-saving layers see on two samples who keeps what; without it
            ``model(**batch)`` where batches are dicts, and the model's structure otherwise.
        blocks: module paths of the model's blocks, as a task's ``blocks``.
        max_grad_norm: what the loop clips gradients at.

    Returns:
        The three to give to ``accelerator.prepare``: model and optimizer changed in place, and a changed copy of the
        loader.

    Raises:
        PlanError: the plan is for another model or device, the accelerator is not the plan's, one of the three was
            prepared already, or the plan asks for what they cannot do.
    """
    check_version("accelerate")
    refuse_other_models(plan)
    own = of_one_rank(plan, accelerator.num_processes)
    _check_accelerator(plan, accelerator)
    if type(optimizer).__name__ == "AcceleratedOptimizer" or type(loader).__module__.startswith("accelerate."):
        raise PlanError(
            "the optimizer or the loader came from accelerator.prepare, and a plan comes before that. Call "
            "model, optimizer, loader = autotune.integrations.accelerate.prepare(plan, accelerator, model, optimizer, "
            "loader) first."
        )
    check_model(plan, model, blocks)
    fed = _loader(own, accelerator, loader)
    run = _run(loader, loss)
    device = accelerator.device if accelerator.device_placement else None
    model = apply_to_model(own, model, blocks=blocks, run=run, device=device)
    optimizer = apply_to_optimizer(own, optimizer, max_grad_norm=max_grad_norm)
    own_methods: _Own | None = vars(accelerator).get(_OWN)
    if own_methods is None:
        own_methods = vars(accelerator)[_OWN] = _Own(accelerator.prepare_data_loader, accelerator.autocast)
        tell(plan, "Accelerate", missing=_beyond(plan))
    _around_loaders(accelerator, own_methods.prepare_data_loader)
    _around_loss(plan, accelerator, own_methods.autocast)
    return model, optimizer, fed


def _check_accelerator(plan: Plan, accelerator: Any) -> None:
    found = {name: getattr(accelerator, name) for name in ("gradient_accumulation_steps", "mixed_precision")}
    wrong = [
        f"{name} = {found[name]!r}, and the plan's is {wanted!r}"
        for name, wanted in arguments(plan).items()
        if found[name] != wanted
    ]
    if wrong:
        raise PlanError(
            f"the Accelerator is not the plan's: {'; '.join(wrong)}. Build it as "
            "Accelerator(..., **autotune.integrations.accelerate.arguments(plan)), and leave what it says out of "
            "`accelerate config`."
        )
    settings, device = plan.settings, accelerator.device.type
    if plan.budget.device not in (None, device):
        raise PlanError(f"budget.device: the plan is for {plan.budget.device}, but the Accelerator is on {device}.")
    if settings.precision.kind == "fp16" and device == "cpu":
        raise PlanError("settings.precision.kind: fp16 is for CUDA devices, but the Accelerator is on cpu. Use bf16.")
    rewriting = [one.name for one in settings.chosen() if one.rewrites]
    if rewriting and (backend := accelerator.state.dynamo_plugin.backend) != "NO":
        raise PlanError(
            f"the Accelerator compiles the model itself ({backend}), and {rewriting[0]} would not be applied. Leave "
            "dynamo_backend out (ACCELERATE_DYNAMO_BACKEND=no)."
        )


def _loader(plan: Plan, accelerator: Any, loader: DataLoader[Any]) -> DataLoader[Any]:
    """The user's loader with the plan's micro-batch and options; Accelerate shards it."""
    batch = plan.settings.batch
    if batch is not None and accelerator.split_batches:
        whole = batch.model_copy(update={"micro": batch.micro * accelerator.num_processes})
        plan = plan.model_copy(update={"settings": plan.settings.having(whole)})
    changed = changed_loader(plan, loader)
    vars(changed)[_PLAN] = plan
    return changed


def _around_loaders(accelerator: Any, own: Callable[..., Any]) -> None:
    """Have ``accelerator.prepare`` hand the plan of a loader on to the one that it makes of it."""

    def prepare_data_loader(data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = own(data_loader, *args, **kwargs)
        if (plan := vars(data_loader).get(_PLAN)) is not None:
            put_at_first_epoch(plan, prepared.base_dataloader, accelerator.device)
        return prepared

    accelerator.prepare_data_loader = prepare_data_loader


def _run(loader: DataLoader[Any], loss: Callable[[nn.Module, Any], Any] | None) -> Run | None:
    """Forward and loss on two samples, with the model that it is given; None where nobody says what those are."""
    run = on_two_samples(loader.dataset, loader.collate_fn, loss or (lambda model, batch: model(**batch)))
    if run is None or loss is not None:
        return run
    with undisturbed():
        return run if isinstance(loader.dataset[0], dict) else None


def _around_loss(plan: Plan, accelerator: Any, own: Callable[..., Any]) -> None:
    """Have ``accelerator.autocast()``, which encloses a loss outside the model, apply all that a plan has
    there: layers too."""

    @contextmanager
    def autocast(*args: Any, **kwargs: Any) -> Iterator[None]:
        with own(*args, **kwargs), plan.settings.forward_context(accelerator.device.type):
            yield

    accelerator.autocast = autocast


def _beyond(plan: Plan) -> Iterator[str]:
    """What Accelerate leaves to the loop."""
    rows = [one.name for one in plan.settings.techniques() if one.has_context]
    if rows:
        yield (
            f"{' and '.join(rows)} in a loss that is computed outside the model (`with accelerator.autocast():` around "
            "it puts them there)"
        )


def written(plan: Plan) -> str:
    """The lines to write in a loop with an Accelerator."""
    given = "\n".join(f"#     {name}={value!r}" for name, value in arguments(plan).items()) or "#     nothing"
    return f"""\
import autotune
from accelerate import Accelerator
from autotune.integrations.accelerate import arguments, prepare

plan = autotune.load_plan("plan.yaml")
accelerator = Accelerator(**arguments(plan))
model, optimizer, loader = prepare(plan, accelerator, model, optimizer, loader)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

# arguments(plan) is:
{given}
"""
