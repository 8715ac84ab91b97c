"""A plan in a ``transformers.Trainer``: its arguments, and a mixin for what no argument says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..fitting.choices import DEFAULT, Techniques
from ..fitting.fit import fit as choose
from ..fitting.fitted import Fitted
from ..plan import Plan
from ..randomness import undisturbed
from ..training.apply_pieces import apply_to_model, apply_to_optimizer
from .checks import check_model, check_version, even_batch, of_one_rank, of_ranks, refuse_other_models, tell
from .loaders import put_at_first_epoch
from .trainer_task import ignores_count, precision_of, two_samples

_OFF: dict[str, Any] = {"auto_find_batch_size": False, "torch_empty_cache_steps": None}
"""What would change the batch, or empty the allocator's cache, beside any plan."""


def arguments(plan: Plan) -> dict[str, Any]:
    """The keyword arguments of a plan, for ``TrainingArguments(..., **arguments(plan))``, and those that must be off.

    Raises:
        PlanError: the plan is in uneven micro-batches.
    """
    settings, given = plan.settings, dict(_OFF)
    if (batch := even_batch(plan, "a Trainer")) is not None:
        given |= {"per_device_train_batch_size": batch.micro, "gradient_accumulation_steps": batch.accumulate}
    if plan.evaluation_batch is not None:
        given["per_device_eval_batch_size"] = plan.evaluation_batch
    return given | settings.options_of("Trainer")


class PlanMixin:
    """In front of a Trainer's class: ``class PlannedTrainer(PlanMixin, Trainer): pass``, and ``plan=`` beside its own
    arguments, which hold :func:`arguments`.

    The plan is put on the model right before the optimizer is built, on the optimizer as it is, on the data as the
    training loader is. ``blocks=`` is what a task's ``blocks`` are.
    """

    model: Any
    args: Any
    train_dataset: Any
    data_collator: Any

    def __init__(self, *args: Any, plan: Plan, blocks: tuple[str, ...] = (), **kwargs: Any) -> None:
        """
        Raises:
            PlanError: the plan is for another model or device, or the Trainer's arguments are not the plan's.
        """
        check_version("transformers")
        refuse_other_models(plan)
        if plan.settings.precision.kind == "fp16" and not torch.cuda.is_available():
            raise PlanError("settings.precision.kind: fp16 is for CUDA devices, and torch sees none here. Use bf16.")
        super().__init__(*args, **kwargs)
        self._take(plan, blocks)

    def _take(self, plan: Plan, blocks: tuple[str, ...]) -> None:
        self.plan, self._plan_blocks = plan, tuple(blocks)
        self._plan_of_rank = of_one_rank(plan, self.args.world_size)
        self._planned: nn.Module | None = None
        self._plan_loader: Any = None
        self._plan_changed: list[str] = []
        _check(self)
        check_model(plan, self.model, self._plan_blocks)

    def get_train_dataloader(self) -> Any:
        """The Trainer's own, loaded as the plan has it."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        _check_loader(self._plan_of_rank, loader)
        put_at_first_epoch(self._plan_of_rank, getattr(loader, "base_dataloader", loader), self.args.device)
        self._plan_loader = loader
        return loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, for the model with the plan on it."""
        if args or kwargs:
            raise PlanError(
                "the Trainer builds its optimizer from a model that is sharded already (FSDP 1), and a plan comes "
                "before that. Use fsdp_version 2, or no FSDP."
            )
        is_first = self._planned is not self.model
        if is_first:
            self._put_on_model()
        optimizer = super().create_optimizer()  # type: ignore[misc]
        self.optimizer = apply_to_optimizer(
            self._plan_of_rank, optimizer, max_grad_norm=self.args.max_grad_norm or None
        )
        if is_first:
            tell(self.plan, "a Trainer", self._plan_changed)
        return self.optimizer

    def compute_loss_context_manager(self) -> Any:
        """The Trainer's own, and the plan's: autocast and layers in the loss too, where that is outside the model."""
        stack = super().compute_loss_context_manager()  # type: ignore[misc]
        stack.enter_context(self.plan.settings.forward_context(self.args.device.type))
        return stack

    def _put_on_model(self) -> None:
        model = self.model
        check_model(self.plan, model, self._plan_blocks)
        if self.plan.settings.checkpointing.kind != "none" and getattr(model, "is_activation_checkpointing", False):
            model.activation_checkpointing_disable()
            self._plan_changed.append("the model's own activation checkpointing off")
        model.train()  # as each training step does
        loader, self._plan_loader = self._plan_loader or self.get_train_dataloader(), None
        if self.args.gradient_accumulation_steps > 1 and ignores_count(self, model, loader):
            self.loss_is_scaled_for_ga = False
            self._plan_changed.append(
                f"losses divided by {self.args.gradient_accumulation_steps} (they ignore num_items_in_batch)"
            )
        run = two_samples(self, loader)
        self.model = apply_to_model(self._plan_of_rank, model, blocks=self._plan_blocks, run=run)
        if self.model is not model:
            self.model_wrapped = self.model
        self._planned = self.model


def fit(
    trainer: Any,
    budget: str | int,
    *,
    batch: Any = None,
    techniques: Techniques | None = None,
    blocks: tuple[str, ...] = (),
    dry_run: bool = False,
) -> Fitted:
    """Have a Trainer train within a memory budget, at the least time: :func:`autotune.fit` in one line before
    ``trainer.train()``. Its arguments, its batch and the arithmetic stay.

    Under ``torchrun`` every rank calls it, and all take the same choice.

    Args:
        trainer: a ``transformers.Trainer`` that has not trained. Its class is put behind :class:`PlanMixin`.
        budget: what the device may charge the process, ``"8GiB"`` or bytes.
        batch: as its loader collates it, of the largest shapes that will come; None is the first.
        techniques: as :func:`autotune.fit` has them. None is recomputed blocks, memory-saving layers and, where
            gradients are neither clipped nor accumulated (``max_grad_norm=0``), the optimizer's step within backward.
        blocks: module paths of the model's blocks.
        dry_run: choose, and leave the Trainer as it is.

    Returns:
        What was chosen; its plan is applied as the Trainer builds its optimizer.

    Raises:
        NothingFits, UserError, TaskError: as :func:`autotune.fit`; the Trainer is as it was.
        PlanError: it has a plan already, or options that do not go with what was chosen.
    """
    if hasattr(trainer, "plan"):
        raise PlanError("the Trainer has a plan already. Fit one without.")
    args = trainer.args
    if batch is None:
        with undisturbed():
            batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()  # as each training step does
    fitted = choose(
        trainer.model,
        batch,
        budget,
        loss=lambda model, batch: trainer.compute_loss(model, dict(batch)),
        optimizer=trainer.optimizer or partial(_optimizer_of, trainer),
        techniques=DEFAULT if techniques is None else techniques,
        accumulate=args.gradient_accumulation_steps,
        max_grad_norm=args.max_grad_norm or None,
        precision=precision_of(trainer),
        blocks=blocks,
        dry_run=True,
    )
    if dry_run:
        return fitted
    plan = of_ranks(fitted.plan, args.world_size)
    own = type(trainer)
    trainer.__class__ = type(own.__name__, (PlanMixin, own), {})
    try:
        trainer._take(plan, blocks)
    except PlanError:
        trainer.__class__ = own
        for name in ("plan", "_plan_blocks"):
            vars(trainer).pop(name, None)
        raise
    return replace(fitted, plan=plan, applied=True)


def _optimizer_of(trainer: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The one that a Trainer builds, of another model."""
    own = trainer.model
    trainer.model = model
    try:
        found: torch.optim.Optimizer = trainer.create_optimizer()
        return found
    finally:
        trainer.model, trainer.optimizer = own, None


def _check(trainer: Any) -> None:
    """What the Trainer's arguments came to is what the plan says."""
    plan, args = trainer.plan, trainer.args
    wrong = [
        f"{name} = {getattr(args, name)!r}, and the plan's is {wanted!r}"
        for name, wanted in arguments(plan).items()
        if getattr(args, name) != wanted
    ]
    kind = plan.settings.precision.kind
    for name, wanted in plan.settings.options_of("Accelerator").items():
        if (got := getattr(trainer.accelerator, name)) != wanted:
            wrong.append(f"accelerate computes in {got} (ACCELERATE_MIXED_PRECISION?), and the plan in {kind}")
    if kind == "tf32" and args.tf32 is not None:
        wrong.append(f"tf32 = {args.tf32!r}, which the plan sets itself: leave it out")
    if wrong:
        raise PlanError(
            f"the Trainer is not the plan's: {'; '.join(wrong)}. Build its arguments as "
            "TrainingArguments(..., **autotune.integrations.transformers.arguments(plan))."
        )
    if plan.budget.device not in (None, args.device.type):
        raise PlanError(
            f"budget.device: the plan is for {plan.budget.device}, but the Trainer trains on {args.device.type}."
        )
    if args.n_gpu > 1:
        raise PlanError(
            f"the Trainer would split each batch over {args.n_gpu} devices (nn.DataParallel). Let it see one "
            "(CUDA_VISIBLE_DEVICES=0), or start it by torchrun."
        )


def _check_loader(plan: Plan, loader: Any) -> None:
    """A Trainer may build its loader otherwise than by its arguments."""
    batch, sampler = plan.settings.batch, loader.batch_sampler
    found: int | None = getattr(sampler, "batch_size", None) or loader.batch_size
    if batch is None or found == batch.micro:
        return
    if found is not None:
        raise PlanError(f"the Trainer's loader yields batches of {found}, and the plan trains on {batch.describe()}.")
    made_by = type(getattr(sampler, "batch_sampler", sampler))  # several ranks share one out by accelerate's
    if made_by.__module__.startswith("transformers."):  # a user's own may make batches of one size
        raise PlanError(
            f"the Trainer's loader makes batches of any size ({made_by.__name__}), and the plan trains on "
            f"{batch.describe()}. Use another train_sampling_strategy, or leave batch out of the plan."
        )


def written(plan: Plan) -> str:
    """The lines to write in a job that trains by a Trainer."""
    given = "\n".join(f"#     {name}={value!r}" for name, value in arguments(plan).items())
    return f"""\
import autotune
from autotune.integrations.transformers import PlanMixin, arguments
from transformers import Trainer, TrainingArguments

plan = autotune.load_plan("plan.yaml")


class PlannedTrainer(PlanMixin, Trainer):
    pass


args = TrainingArguments("out", **arguments(plan))
trainer = PlannedTrainer(model, args, train_dataset=dataset, plan=plan)

# arguments(plan) is:
{given}
"""
