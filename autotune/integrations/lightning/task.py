"""``autotune.from_lightning``: a LightningModule and its data as a task."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import TaskError
from ...task import Task
from ..checks import check_version
from .hooks import batch_hook, is_own, logging_to, nowhere

PRECISIONS: dict[Any, Any] = {**dict.fromkeys(("32-true", "32", 32, None)), "bf16-mixed": "bf16", "16-mixed": "fp16"}
_LEFT_OUT = ("on_train_batch_start", "on_train_batch_end", "optimizer_step", "configure_gradient_clipping", "backward")
"""Hooks of a module that a trial does not call."""
_OPTIONS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "timeout", "worker_init_fn")


def from_lightning(
    build_module: Callable[[], Any],
    build_data: Callable[[], Any],
    trainer: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Task:
    """A task of a Lightning job: ``task = autotune.from_lightning(build_module, build_data)`` in its file.

    Args:
        build_module: builds the LightningModule, whose ``training_step`` is the loss.
        build_data: builds its training DataLoader, a pair of that and one for validation, or a LightningDataModule;
            called once, and seeded.
        trainer: what the job gives its Trainer today; precision, accumulate_grad_batches and gradient_clip_val
            become the task's; limit_val_batches and a callback's monitor bear on its evaluation.
        **fields: any other field of a task, or one in the place of what Lightning says.

    Raises:
        TaskError: it is no job with one optimizer and one DataLoader that batches by size.
    """
    for name, function in (("build_module", build_module), ("build_data", build_data)):
        is_built = not isinstance(function, type) and hasattr(function, "state_dict")
        if is_built or not callable(function):
            raise TaskError(
                f"autotune.from_lightning: {name} must be a function, since each trial builds its own, but got "
                f"{type(function).__name__}. Use lambda: ..."
            )
    check_version("lightning")
    from .evaluation import evaluation_of

    trainer = trainer or {}
    data, loader, held_out = _loaders(build_data)
    accumulate = trainer.get("accumulate_grad_batches", 1)
    found: dict[str, Any] = {
        "build_model": functools.partial(_built, build_module),
        "build_dataset": lambda: loader.dataset,
        "compute_loss": functools.partial(training_loss, data=data),
        "build_optimizer": build_optimizer,
        "build_scheduler": _build_scheduler,
        "collate": loader.collate_fn,
        "loader_options": {name: value for name in _OPTIONS if (value := getattr(loader, name)) is not None},
        "batch_size": loader.batch_size * accumulate,
        "micro_batch_size": loader.batch_size,
        "even_batches": True,
        "evaluate": evaluation_of(held_out, data, trainer),
        "evaluates_in_context": True,
        **_stated(trainer),
    }
    if loader.drop_last:
        found["loader_options"]["drop_last"] = True
    if (order := _order(loader)) is not None:
        found["build_sampler"] = order
    return Task(**{**found, **fields})


def training_loss(module: Any, batch: Any, data: Any = None) -> Any:
    """The loss of ``training_step`` on a batch that is on the device; what the step logs goes nowhere.

    Args:
        module: a LightningModule.
        batch: as the loader collates it.
        data: the datamodule, whose hooks around a batch's transfer go before the module's.

    Returns:
        The scalar loss.

    Raises:
        TaskError: the step returned no loss.
    """
    with logging_to(module, nowhere):
        for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
            batch = batch_hook(module, data, name)(batch, 0)
        result = module.training_step(batch, *([0] if _takes_number(module.training_step) else []))
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if loss is None:
        raise TaskError(
            f"{type(module).__name__}.training_step returned {type(result).__name__} and no loss. Return the loss, or "
            'a dict with "loss".'
        )
    return loss


def _takes_number(training_step: Any) -> bool:
    """Whether a trainer gives it the batch's number: a second argument of any name, as Lightning sees it."""
    taken = inspect.signature(training_step).parameters.values()
    in_order = [one for one in taken if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return len(in_order) > 1 or any(one.kind is one.VAR_POSITIONAL for one in taken)


def _built(build_module: Callable[[], Any]) -> Any:
    module = build_module()
    if not hasattr(module, "training_step") or not hasattr(module, "configure_optimizers"):
        raise TaskError(
            f"autotune.from_lightning: build_module returned {type(module).__name__}. Wanted: a LightningModule."
        )
    if not module.automatic_optimization:
        raise TaskError(
            f"{type(module).__name__} optimizes manually, so that backward and step are its own. Write a task with "
            "build_model and compute_loss, or set automatic_optimization = True."
        )
    module.setup("fit")
    module.configure_model()
    left_out = [name for name in _LEFT_OUT if is_own(module, name)]
    if left_out:
        warnings.warn(
            f"{type(module).__name__} has {', '.join(left_out)}, which trials do not call. State what they do as "
            "after_backward, after_step or max_grad_norm: autotune.from_lightning(..., after_step=...).",
            stacklevel=2,
        )
    return module


def build_optimizer(model: Any) -> Any:
    """The one of ``configure_optimizers``, at its schedule's base learning rate, which trials do not change; with the
    schedule, for who goes by that."""
    try:
        made = model.configure_optimizers()
    except RuntimeError as error:
        raise TaskError(
            f"{type(model).__name__}.configure_optimizers raised {error}. Where it needs a trainer, which trials have "
            "not, give autotune.from_lightning(..., build_optimizer=...)."
        ) from error
    schedules: list[Any] = []
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (list, tuple)):
        made, schedules = made[0], _listed(made[1])
    found = [one["optimizer"] if isinstance(one, Mapping) else one for one in _listed(made)]
    if len(found) != 1:
        raise TaskError(
            f"{type(model).__name__}.configure_optimizers made {len(found)} optimizers, and a task has one. Give "
            "autotune.from_lightning(..., build_optimizer=...)."
        )
    for group in found[0].param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])
    schedules += [one.get("lr_scheduler") for one in _listed(made) if isinstance(one, Mapping)]
    found[0]._autotune_schedule = next(filter(_goes_by_steps, schedules), None)
    return found[0]


def _goes_by_steps(schedule: Any) -> bool:
    """Whether Lightning steps it after each optimizer step, and by nothing else; by its default it does after each
    epoch, within which the rate is constant."""
    if not isinstance(schedule, Mapping) or "monitor" in schedule:
        return False
    return schedule.get("interval") == "step" and schedule.get("frequency", 1) == 1


def _build_scheduler(optimizer: Any, num_steps: int) -> Any:
    """The schedule that was configured with the optimizer, from its beginning, whose steps are counted in it."""
    found = getattr(optimizer, "_autotune_schedule", None)
    if found is None:
        return None
    schedule = found["scheduler"]
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    return schedule


def _listed(made: Any) -> list[Any]:
    if made is None:
        return []
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _loaders(build_data: Callable[[], Any]) -> tuple[Any, Any, list[Any]]:
    """A datamodule or None, the training loader, and those for validation."""
    from torch.utils.data import BatchSampler, DataLoader

    from ...randomness import seed_everything, undisturbed
    from .evaluation import held_out_loaders

    with undisturbed():
        seed_everything(0)
        made, held_out = build_data(), None
        data = made if hasattr(made, "train_dataloader") else None
        if data is not None:
            data.prepare_data()
            data.setup("fit")
            made = data.train_dataloader()
            held_out = data.val_dataloader() if is_own(data, "val_dataloader") else None
        elif isinstance(made, tuple) and len(made) == 2:
            made, held_out = made
    if not isinstance(made, DataLoader):
        raise TaskError(
            f"autotune.from_lightning: build_data made {type(made).__name__}. Wanted: one torch DataLoader, a pair of "
            "that and one for validation, or a LightningDataModule that has one for training."
        )
    if type(made.batch_sampler) is not BatchSampler:
        raise TaskError(
            "autotune.from_lightning: the training DataLoader makes its batches by "
            f"{type(made.batch_sampler).__name__}, so that other sizes cannot be tried. Give it batch_size."
        )
    return data, made, held_out_loaders(held_out)


def _order(loader: Any) -> Callable[[Any], Any] | None:
    """The order of samples; None where torch shuffles them, or they are a stream."""
    from torch.utils.data import IterableDataset, RandomSampler

    if isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.sampler) is RandomSampler and not loader.sampler.replacement and loader.sampler._num_samples is None:
        return None
    return lambda dataset: loader.sampler


def _stated(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """What the job does today."""
    precision, clip = trainer.get("precision"), trainer.get("gradient_clip_val")
    if precision not in PRECISIONS:
        known = ", ".join(f'"{name}"' for name in ("32-true", "bf16-mixed", "16-mixed"))
        raise TaskError(f"autotune.from_lightning: precision must be one of {known}, but got {precision!r}.")
    if clip and trainer.get("gradient_clip_algorithm", "norm") not in ("norm", None):
        raise TaskError(
            "autotune.from_lightning: gradients are clipped by value, which a task does as after_backward. Give "
            "autotune.from_lightning(..., after_backward=...), and leave gradient_clip_val out."
        )
    return {"precision": PRECISIONS[precision], "max_grad_norm": float(clip) if clip else None}
