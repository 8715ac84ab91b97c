"""A plan in Ray Train: what a run is configured with, and what a worker's training loop prepares."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..plan import Plan

if TYPE_CHECKING:
    import torch
    from ray.train import RunConfig, ScalingConfig
    from torch import nn
    from torch.utils.data import DataLoader

    from ..techniques.support.base import Run

_entered: ContextVar[bool] = ContextVar("_entered", default=False)
"""Whether this thread is within a :func:`forward_context`."""


def environment(plan: Plan) -> dict[str, str]:
    """Variables that a worker is to start with: the plan's allocator, and the threads that it was measured with.

    Ray starts workers with one OpenMP thread for each processor that they ask for, one by default.

    Args:
        plan: as read by :func:`autotune.load_plan`.

    Returns:
        For ``worker_runtime_env={"env_vars": ...}``.

    Raises:
        PlanError: a library is not installed here, or this process's own environment contradicts it.
    """
    variables = plan.settings.environment(os.environ)
    if (threads := _threads(plan)) is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def run_config(plan: Plan, **arguments: Any) -> RunConfig:
    """A ``ray.train.RunConfig`` whose workers start with the plan's :func:`environment`.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        **arguments: the run's own; variables of its ``worker_runtime_env`` stay.

    Raises:
        PlanError: the two want different values of one variable.
    """
    from ray.train import RunConfig

    runtime = dict(arguments.pop("worker_runtime_env", None) or {})
    wanted, own = environment(plan), dict(runtime.get("env_vars") or {})
    for name in sorted(wanted.keys() & own.keys()):
        if wanted[name] != own[name]:
            raise PlanError(
                f"worker_runtime_env: the plan needs {name}={wanted[name]}, but got {own[name]}. Leave it out there."
            )
    arguments["worker_runtime_env"] = {**runtime, "env_vars": {**own, **wanted}}
    return RunConfig(**arguments)


def scaling_config(plan: Plan, **arguments: Any) -> ScalingConfig:
    """A ``ray.train.ScalingConfig`` of one worker with what the plan was measured on: a GPU, or its processors.

    ``num_workers=0`` is Ray's local mode, in the process at hand.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        **arguments: the job's own.

    Raises:
        PlanError: more than one worker, or another device.
    """
    from ray.train import ScalingConfig

    from .checks import check_alone

    workers = arguments.setdefault("num_workers", 1)
    check_alone(plan, max(workers) if isinstance(workers, tuple) else workers, "Ray Train")
    device = plan.budget.device
    if device is not None and arguments.setdefault("use_gpu", device == "cuda") != (device == "cuda"):
        raise PlanError(f"use_gpu: the plan is for {device}, but got {arguments['use_gpu']}. Leave it out.")
    if (threads := _threads(plan)) is not None:
        arguments["resources_per_worker"] = {"CPU": threads, **(arguments.get("resources_per_worker") or {})}
    return ScalingConfig(**arguments)


def prepare_model(
    plan: Plan, model: nn.Module, *, blocks: Sequence[str] = (), run: Run | None = None, **arguments: Any
) -> nn.Module:
    """Put a plan on a model, then ``ray.train.torch.prepare_model`` it; before its optimizer is built.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        model: the job's.
        blocks: as :func:`autotune.apply_to_model` has them.
        run: as there.
        **arguments: of Ray's function.

    Returns:
        The model to train.

    Raises:
        PlanError: the plan is for another model, for one process, or asks for what Ray's loop cannot have.
    """
    import ray.train.torch

    from ..training.apply_pieces import apply_to_model
    from .checks import check_model, check_version, refuse_other_models

    check_version("ray")
    refuse_other_models(plan, is_first=True)
    _check_loop(plan)
    check_model(plan, model, blocks)
    model = apply_to_model(plan, model, blocks=blocks, run=run, device=ray.train.torch.get_device())
    prepared: nn.Module = ray.train.torch.prepare_model(model, **arguments)
    return prepared


def prepare_optimizer(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None = None
) -> torch.optim.Optimizer:
    """Put a plan on the optimizer, say what is applied, and check the loop's first step against the plan.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        model: that :func:`prepare_model` returned; its forward is seen until the first optimizer step.
        optimizer: built from its parameters.
        max_grad_norm: what the loop clips at.

    Returns:
        The optimizer to step.

    Raises:
        PlanError: now, where the optimizer cannot have it; at the first step, where the loop accumulates otherwise, or
            computes in another precision.
    """
    from ..training.apply_pieces import apply_to_optimizer
    from .checks import tell

    optimizer = apply_to_optimizer(plan, optimizer, max_grad_norm=max_grad_norm)
    _FirstStep(plan, model, optimizer)
    tell(plan, "Ray Train")
    return optimizer


def prepare_data_loader(plan: Plan, data_loader: DataLoader[Any], **arguments: Any) -> DataLoader[Any]:
    """The training DataLoader with a plan's micro-batch and options, by ``ray.train.torch.prepare_data_loader``.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        data_loader: a real one: Ray passes over anything else.
        **arguments: of Ray's function.

    Raises:
        PlanError: it is none, or cannot have them.
    """
    import ray.train.torch
    from torch.utils.data import DataLoader

    from ..training.data_loader import changed_loader
    from .loaders import put_at_first_epoch

    if not isinstance(data_loader, DataLoader):
        raise PlanError(f"prepare_data_loader takes a torch DataLoader, but got {type(data_loader).__name__}.")
    changed = changed_loader(plan, data_loader)
    put_at_first_epoch(plan, changed, ray.train.torch.get_device())
    prepared: DataLoader[Any] = ray.train.torch.prepare_data_loader(changed, **arguments)
    return prepared


@contextmanager
def forward_context(plan: Plan) -> Iterator[None]:
    """Context for each forward pass and its loss: autocast, and the loss functions of memory-saving layers."""
    import ray.train.torch

    token = _entered.set(True)
    try:
        with plan.settings.forward_context(ray.train.torch.get_device().type):
            yield
    finally:
        _entered.reset(token)


def written(plan: Plan) -> str:
    """The lines to write in a Ray Train job to apply a plan."""
    batch = plan.settings.batch
    accumulate = batch.accumulate if batch is not None else 1
    lines = [
        "import autotune",
        "from autotune.integrations import ray_train",
        "from ray.train.torch import TorchTrainer",
        "",
        'plan = autotune.load_plan("plan.yaml")',
        "",
        "def train_loop_per_worker():",
        "    model = ray_train.prepare_model(plan, build_model())",
        "    optimizer = ray_train.prepare_optimizer(plan, model, build_optimizer(model.parameters()))",
        f"    loader = ray_train.prepare_data_loader(plan, build_loader()){_micro(plan)}",
    ]
    if accumulate == 1:
        lines += [
            "    for batch in loader:",
            "        with ray_train.forward_context(plan):",
            "            loss = compute_loss(model, batch)",
            "        loss.backward()",
            "        optimizer.step()",
            "        optimizer.zero_grad()",
        ]
    else:
        lines += [
            "    for number, batch in enumerate(loader, 1):",
            "        with ray_train.forward_context(plan):",
            "            loss = compute_loss(model, batch)",
            f"        (loss / {accumulate}).backward()",
            f"        if number % {accumulate} == 0:",
            "            optimizer.step()",
            "            optimizer.zero_grad()",
        ]
    lines += [
        "",
        "trainer = TorchTrainer(",
        "    train_loop_per_worker,",
        "    scaling_config=ray_train.scaling_config(plan),",
        "    run_config=ray_train.run_config(plan),",
        ")",
        "",
    ]
    return "\n".join(lines)


def _micro(plan: Plan) -> str:
    return f"  # batches of {plan.settings.batch.micro}" if plan.settings.batch is not None else ""


def _threads(plan: Plan) -> int | None:
    """That the plan was measured with, on a CPU."""
    return plan.environment.threads if plan.environment is not None and plan.budget.device != "cuda" else None


def _check_loop(plan: Plan) -> None:
    import ray.train.torch

    from .checks import check_alone, in_samples

    check_alone(plan, ray.train.get_context().get_world_size(), "Ray Train")
    if any(technique.scales_loss for technique in plan.settings.techniques()):
        raise PlanError("settings.precision: fp16 needs a loss scaler, which is the loop's. Use bf16.")
    in_samples(plan)
    device = ray.train.torch.get_device().type
    if plan.budget.device not in (None, device):
        raise PlanError(
            f"budget.device: the plan is for {plan.budget.device}, but this worker trains on {device}. Use "
            "scaling_config=ray_train.scaling_config(plan)."
        )


class _FirstStep:
    """Holds a loop's first optimizer step against the plan: backward passes to it, and what its forward runs in."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        settings = plan.settings
        self._batch, self._num_backwards = settings.batch, 0
        self._wants_context = any(one.has_context for one in settings.techniques())
        parameter = next(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            parameter.register_post_accumulate_grad_hook(self._after_backward),
            optimizer.register_step_pre_hook(self._before_step),
        ]

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if model.training and self._wants_context and not _entered.get():
            raise PlanError(
                "the model is called outside `with ray_train.forward_context(plan):`, so that precision and layers are "
                "not applied. Put forward and loss into it."
            )

    def _after_backward(self, _: Any) -> None:
        self._num_backwards += 1

    def _before_step(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        batch = self._batch
        if batch is not None and self._num_backwards not in (0, batch.accumulate):
            raise PlanError(
                f"the plan trains on {batch.describe()}, but the loop steps after {self._num_backwards} backward "
                f"passes. Step after every {batch.accumulate}, each loss divided by that."
            )
