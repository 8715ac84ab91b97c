"""The parts of ``apply``: put a plan on a model, an optimizer or a dataset, for trainers that build the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from ..device_memory import cap
from ..errors import PlanError
from ..internals import lost
from ..nested import to_device
from ..plan import Plan
from ..randomness import undisturbed
from ..techniques import LoaderSpec, Stage
from ..techniques.checkpointing import find_blocks
from ..techniques.support.base import Run
from .launched import ENFORCE_VARIABLE, stand_aside
from .weights import load_kept


def apply_to_model(
    plan: Plan,
    model: nn.Module,
    *,
    blocks: Sequence[str] = (),
    run: Run | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Put a plan on a model, before its optimizer is built. What an earlier plan put on it is taken off.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        model: the user's, or what an earlier call returned.
        blocks: module paths of its blocks, or of containers of them; none are found by themselves.
        run: its forward and loss on two samples, with the model that it is given: memory-saving layers look at it.
        device: where the model goes; None is where it is.

    Returns:
        The model to train: as a rule the same, changed in place.

    Raises:
        PlanError: the plan asks for what this model or device cannot do, or its weights are not there or another's.
        TaskError: ``blocks`` names no module of the model.
    """
    stand_aside()
    _check_internals(plan)
    settings = plan.settings
    model = undo(plan, model, device)
    found = find_blocks(model, blocks)
    for stage in Stage:
        if stage is Stage.DEVICE and device is not None:
            model = model.to(device)
        for technique in settings.at(stage):
            put = technique.on_model if plan.inference is None else technique.on_inference
            model = put(model, found, run)
    if plan.weights is not None:
        load_kept(plan.weights, model)
    return model


def undo(plan: Plan, model: nn.Module, device: torch.device | str | None) -> nn.Module:
    """The model without what an earlier plan put on it, but for what this one can go on with.

    Args:
        plan: applied next.
        model: which a plan that is refused leaves as it is.
        device: where it goes then; None is where it is.

    Raises:
        PlanError: what the plan wants cannot be had back, or not on this model or device.
    """
    for technique in plan.settings.techniques():
        technique.check_model(model, None if device is None else torch.device(device))
    for stage in reversed(Stage):
        for technique in plan.settings.at(stage):
            model = technique.undo(model)
    return model


def apply_to_optimizer(
    plan: Plan, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None = None
) -> torch.optim.Optimizer:
    """Put a plan on an optimizer, before its first step. What an earlier plan put on it is taken off.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        optimizer: built from the parameters of the model that :func:`apply_to_model` returned.
        max_grad_norm: what the norm of all gradients is clipped at before each step; None where it is not.

    Returns:
        The optimizer to step: as a rule the same, changed in place.

    Raises:
        PlanError: the plan asks for what this optimizer cannot do, or is for inference.
    """
    stand_aside()
    _check_internals(plan)
    if plan.inference is not None:
        raise PlanError("inference: the plan is for inference, and was measured without an optimizer. Search again.")
    for stage in Stage:
        for technique in plan.settings.at(stage):
            optimizer = technique.on_optimizer(optimizer, max_grad_norm)
    return optimizer


def apply_to_loader(
    plan: Plan,
    dataset: Any,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    options: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> LoaderSpec:
    """What a DataLoader is to be built from with a plan applied; batching is the caller's, by ``plan.settings.batch``.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        dataset: map-style or iterable.
        collate: the user's collate function; None is torch's default_collate.
        options: DataLoader keywords of today, other than dataset, batching, sampler and collate_fn.
        device: where batches go.

    Returns:
        ``dataset`` (maybe a cache of it), ``collate`` and ``options``.

    Raises:
        PlanError: the plan asks for a cache that cannot hold this dataset.
    """
    stand_aside()
    _check_internals(plan)
    spec = LoaderSpec(dataset, collate, dict(options or {}), torch.device(device), user_dataset=dataset)
    for stage in Stage:
        for technique in plan.settings.at(stage):
            spec = technique.on_loader(spec)
    return spec


def hold_to_budget(plan: Plan, enforce: bool = False, repeats: bool = True) -> None:
    """Hold this process, from its first use of CUDA on, to what the plan's trials were held to.

    Args:
        plan: with a budget for CUDA, or for any device; one without a limit lifts the one that is set.
        enforce: to the process's end, as ``autotune run --enforce`` does; else a step that needs more lifts it.
        repeats: whether a step that memory ran out in is made again, as :meth:`Training.step` does alone; else the
            budget's margin is not taken off, so that what differs a little from the trials ends no job.
    """
    if plan.budget.device == "cpu":
        return
    known = plan.measured or plan.reference  # a trial has that of the job as it stands
    peak = known.peak if known is not None else None
    context_bytes = peak.process - peak.reserved if peak is not None and peak.reserved is not None else 0
    is_enforced = enforce or os.environ.get(ENFORCE_VARIABLE) == "1"
    budget = plan.budget
    margin = budget.factor - 1 if repeats or is_enforced or budget.as_it_stands else 0.0
    cap.hold(budget.limit, margin, is_enforced, context_bytes)


def _check_internals(plan: Plan) -> None:
    """
    Raises:
        PlanError: a technique goes by a private part of torch that the installed version does not have.
    """
    for technique in plan.settings.chosen():
        if technique.goes_by is not None and (reason := lost(technique.goes_by)) is not None:
            raise PlanError(
                f"settings.{technique.name}: {reason}. Leave that row out, or use the version that the plan names."
            )


def on_two_samples(dataset: Any, collate: Any, loss: Callable[[nn.Module, Any], Any]) -> Run | None:
    """What runs the model that it is given, forward and loss, and leaves everything random as it was.

    Args:
        dataset: of samples by number.
        collate: makes a batch of them; None is not known.
        loss: of a model and a batch that is where the model is.

    Returns:
        None where samples can be read only once, or there are none, or nobody says how they are collated.
    """
    is_empty = hasattr(dataset, "__len__") and len(dataset) == 0
    if isinstance(dataset, IterableDataset) or is_empty or collate is None:
        return None

    def run(model: nn.Module) -> Any:
        with undisturbed():
            batch = collate([dataset[number] for number in range(min(2, len(dataset)))])
            return loss(model, to_device(batch, next(model.parameters()).device))

    return run
