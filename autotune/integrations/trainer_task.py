"""``autotune.from_trainer``: the job of a ``transformers.Trainer`` as a task."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from ..errors import TaskError
from ..measure.checks.quality import NoQuality
from ..randomness import alike, random_state, seed_everything, set_random_state, undisturbed
from ..task import Task
from ..techniques.support.base import Run
from ..training.apply_pieces import on_two_samples
from .checks import check_version

_SEED = 0
"""Of the Trainer that is built as the file is read: that of a search and of its trials, where nobody gives another."""
_WITHOUT_STEPS = ("constant", "reduce_lr_on_plateau")
"""Kinds of a learning rate's schedule that no count of steps decides."""


def from_trainer(build_trainer: Callable[[], Any], **fields: Any) -> Task:
    """The job of a ``transformers.Trainer``; a task file ends with ``task = autotune.from_trainer(build_trainer)``.

    Args:
        build_trainer: returns the Trainer as the job builds it, without a plan. It is called as the file is read,
            and again for each model after the first, or where everything is seeded otherwise than with 0.
        **fields: any other field of a task, or one in the place of what the Trainer says.

    Returns:
        A task with the Trainer's model, data, loss, optimizer, batch, precision and clipping.

    Raises:
        TaskError: it returns no Trainer, or one whose batches or ranks a task does not have.
    """
    check_version("transformers")
    job = _Job(build_trainer)
    trainer, loader = job.trainer, job.loader
    args, iterable = trainer.args, isinstance(loader.dataset, IterableDataset)
    sampler = None if iterable else loader.batch_sampler.sampler
    if left := [*_left_to_the_plan(args)]:
        warnings.warn(
            f"autotune.from_trainer: {', '.join(left)}: left to the plan, and off in what it is compared with.",
            stacklevel=2,
        )
    workers = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    found: dict[str, Any] = {
        "build_model": job.build_model,
        "build_dataset": lambda: loader.dataset,
        "compute_loss": job.compute_loss,
        "build_optimizer": job.build_optimizer,
        "build_scheduler": job.build_scheduler,
        "collate": loader.collate_fn,
        "build_sampler": None if iterable or type(sampler) is RandomSampler else job.build_sampler,
        "loader_options": {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            **({"drop_last": True} if args.dataloader_drop_last else {}),
            **(workers if loader.num_workers else {}),
        },
        "batch_size": args.train_batch_size * args.gradient_accumulation_steps,
        "micro_batch_size": args.train_batch_size,
        "even_batches": True,
        "precision": precision_of(trainer),
        "max_grad_norm": args.max_grad_norm or None,
    }
    if trainer.eval_dataset is not None:
        found |= {"evaluate": job.evaluation(), "evaluates_in_context": True}
    return Task(**{**found, **fields})


def _left_to_the_plan(args: Any) -> Iterator[str]:
    names = ("activation_checkpointing", "torch_compile", "use_liger_kernel", "auto_find_batch_size")
    yield from (f"{name}={value!r}" for name in names if (value := getattr(args, name)))
    if args.torch_empty_cache_steps is not None:
        yield f"torch_empty_cache_steps={args.torch_empty_cache_steps}"


def precision_of(trainer: Any) -> Any:
    """What a Trainer computes in, as a task says it."""
    found = trainer.accelerator.mixed_precision
    if found in ("bf16", "fp16"):
        return found
    return "tf32" if trainer.args.tf32 else None


def _higher(args: Any, metrics: Mapping[str, float]) -> float | NoQuality:
    """What the Trainer keeps its best model by, so that higher is better; the loss, unless it says another."""
    name = (args.metric_for_best_model or "loss").removeprefix("eval_")
    name, is_higher = (name, bool(args.greater_is_better)) if f"eval_{name}" in metrics else ("loss", False)
    if f"eval_{name}" not in metrics:
        found = ", ".join(sorted(one.removeprefix("eval_") for one in metrics)) or "no metric"
        return NoQuality(
            f"the Trainer evaluates without a loss, since its eval_dataset has no labels, and to {found}. Give it "
            "compute_metrics, and metric_for_best_model with greater_is_better; or "
            "autotune.from_trainer(..., evaluate=...)"
        )
    value = float(metrics[f"eval_{name}"])
    return value if is_higher else -value


def _metrics(trainer: Any) -> dict[str, float]:
    """What evaluating on its data, or each of several, comes to."""
    data = trainer.eval_dataset
    found: dict[str, float] = {}
    loss_alone = True if trainer.compute_metrics is None else None
    for name in data if isinstance(data, Mapping) else (None,):
        loader, prefix = trainer.get_eval_dataloader(name), "eval" if name is None else f"eval_{name}"
        found |= trainer.evaluation_loop(loader, "Evaluation", loss_alone, metric_key_prefix=prefix).metrics
    return found


@contextmanager
def _precision_around(trainer: Any) -> Iterator[None]:
    """Have Accelerate compute in the autocast that is on here, which is the plan's, and in none where none is."""
    accelerator, device = trainer.accelerator, trainer.args.device.type
    own = accelerator.native_amp, accelerator.state._mixed_precision
    is_on = torch.is_autocast_enabled(device)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(torch.get_autocast_dtype(device), "no")
    accelerator.native_amp, accelerator.state._mixed_precision = is_on, name if is_on else "no"
    try:
        yield
    finally:
        accelerator.native_amp, accelerator.state._mixed_precision = own


class _Job:
    """One Trainer, by which it is known what the job does. Its model is the first that is asked for, where that is
    seeded as it was; others are built anew, each from its own start."""

    def __init__(self, build_trainer: Callable[[], Any]) -> None:
        self._build = build_trainer
        with undisturbed():
            seed_everything(_SEED)
            self._seeded = random_state()
            self.trainer = trainer = self._built()
            self._built_state = random_state()
        self.loader: Any = trainer.get_train_dataloader()
        _check(trainer, self.loader)
        self._first: tuple[Any, Any] | None = None
        if trainer.model_init is None:  # else the Trainer has seeded its model by its own arguments
            self._first = (trainer.model, trainer.optimizer)
        self._optimizer: Any = None
        self._has_schedule = trainer.lr_scheduler is not None
        self._has_own = trainer.optimizer is not None and trainer.model_init is None
        self._ignores_count = ignores_count(trainer, trainer.model, self.loader)
        if self._ignores_count and trainer.args.gradient_accumulation_steps > 1:
            warnings.warn(
                "the model, or compute_loss_func, takes num_items_in_batch and ignores it: the Trainer adds up the "
                f"gradients of {trainer.args.gradient_accumulation_steps} micro-batches and divides them by nothing. "
                "The task takes their mean. Set model.accepts_loss_kwargs = False, or trainer.loss_is_scaled_for_ga.",
                stacklevel=3,
            )
        self._let_go()

    def build_model(self) -> nn.Module:
        """As the Trainer trains it."""
        (first, self._first), self._optimizer = (self._first, None), None
        if first is not None and alike(random_state(), self._seeded):
            model, self._optimizer = first
            set_random_state(self._built_state)
        elif self.trainer.model_init is not None:
            model = self.trainer.call_model_init()
        else:
            del first  # before another is built
            other = self._built()
            model, self._optimizer = other.model, other.optimizer
        model.train()
        if getattr(model, "config", None) is not None:
            model.config.use_cache = self.trainer.args.use_cache
        return model  # type: ignore[no-any-return]

    def build_optimizer(self, model: nn.Module) -> Any:
        """The one that was given to the Trainer, or that it builds."""
        if self._has_own:
            optimizer, self._optimizer = self._optimizer, None  # which would keep the model's parameters
            return optimizer
        self.trainer.model = model
        try:
            return self.trainer.create_optimizer()
        finally:
            self.trainer.optimizer = self.trainer.model = None

    def build_scheduler(self, optimizer: Any, num_steps: int) -> Any:
        """The one that it builds for a training of so many steps; None where that keeps the rate, or one was given to
        it, which is of another optimizer."""
        trainer = self.trainer
        if self._has_schedule or trainer.args.lr_scheduler_type in _WITHOUT_STEPS:
            return None
        try:
            return trainer.create_scheduler(num_steps, optimizer)
        finally:
            trainer.lr_scheduler = None  # which would keep the model's parameters, and be the next one's too

    def build_sampler(self, dataset: Any) -> Any:
        """The Trainer's."""
        return self.trainer.get_train_dataloader().batch_sampler.sampler

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        """As the Trainer computes it: (sum, items) where it divides by the items of the whole step."""
        trainer = self.trainer
        count = None if self._ignores_count else trainer._get_num_items_in_batch([batch], trainer.args.device)
        if count is None:
            return trainer.compute_loss(model, dict(batch))
        return trainer.compute_loss(model, dict(batch), num_items_in_batch=torch.ones_like(count)), count

    def evaluation(self) -> Callable[..., float | NoQuality]:
        """The task's ``evaluate``: the Trainer's own evaluation, in the plan's precision, and not logged."""
        own = self.trainer.args.per_device_eval_batch_size

        def evaluate(model: nn.Module, batch_size: int = own) -> float | NoQuality:
            trainer = self.trainer
            trainer.args.per_device_eval_batch_size = batch_size
            trainer.model, trainer.model_wrapped, trainer.is_in_train = model, model, True  # it is never cast then
            vars(trainer).pop("_eval_dataloaders", None)  # which persistent workers keep, with their batch
            try:
                with _precision_around(trainer):
                    return _higher(trainer.args, _metrics(trainer))
            finally:
                trainer.args.per_device_eval_batch_size = own
                trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
                trainer.accelerator.free_memory()
                trainer.model, trainer.model_wrapped, trainer.is_in_train = None, None, False

        return evaluate

    def _built(self) -> Any:
        trainer = self._build()
        if not all(hasattr(trainer, name) for name in ("get_train_dataloader", "compute_loss", "create_optimizer")):
            raise TaskError(
                "autotune.from_trainer: the function must return a transformers.Trainer, but got "
                f"{type(trainer).__name__}."
            )
        if hasattr(trainer, "plan"):
            raise TaskError("autotune.from_trainer: the Trainer has a plan already. Return one without PlanMixin.")
        return trainer

    def _let_go(self) -> None:
        trainer = self.trainer
        trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
        trainer.optimizer = trainer.callback_handler.optimizer = None  # they would keep the first model's parameters
        trainer.lr_scheduler = trainer.callback_handler.lr_scheduler = None
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


def _check(trainer: Any, loader: Any) -> None:
    args = trainer.args
    if args.world_size > 1 or args.n_gpu > 1:
        raise TaskError(
            f"autotune.from_trainer: a search's trial is one process on one device, but the Trainer has "
            f"{max(args.world_size, args.n_gpu)}. Start it without torchrun, with CUDA_VISIBLE_DEVICES=0."
        )
    if not isinstance(loader.dataset, IterableDataset) and type(loader.batch_sampler) is not BatchSampler:
        raise TaskError(
            f"autotune.from_trainer: the Trainer's loader has a batch sampler ({type(loader.batch_sampler).__name__}), "
            "and a search chooses the batch. Use another train_sampling_strategy."
        )


def two_samples(trainer: Any, loader: Any, count: int | None = None) -> Run | None:
    """As :func:`on_two_samples`, with the Trainer's loss; of a step of ``count`` items, if any."""

    def loss(model: nn.Module, batch: Any) -> Any:
        items = None if count is None else torch.tensor(count, device=trainer.args.device)
        return trainer.compute_loss(model, trainer._prepare_inputs(batch), num_items_in_batch=items)

    return on_two_samples(loader.dataset, loader.collate_fn, loss)


def ignores_count(trainer: Any, model: nn.Module, loader: Any) -> bool:
    """Whether the Trainer takes the loss for one that is divided by the items of the whole step, and it is not: then
    gradients over several micro-batches add up and are divided by nothing.

    A module whose ``forward`` has ``**kwargs`` is told ``num_items_in_batch``, and need not heed it.
    """
    takes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    one, many = (two_samples(trainer, loader, count) for count in (1, 1000))
    if not takes or trainer.loss_is_scaled_for_ga is not None or one is None or many is None:
        return False
    first = loader.collate_fn([loader.dataset[0]])
    if trainer._get_num_items_in_batch([first], trainer.args.device) is None:
        return trainer.compute_loss_func is not None
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        of_one, of_many = float(one(model)), float(many(model))
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return abs(of_one - of_many) <= 1e-3 * abs(of_one)
