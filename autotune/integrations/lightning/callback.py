"""A plan put on a Lightning job: by a callback before its optimizer is built, and by a plugin for its precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
from torch.utils.data import DataLoader

from ...errors import PlanError
from ...plan import Plan
from ...randomness import undisturbed
from ...techniques import Settings
from ...techniques.precision import Precision
from ...techniques.support.base import Run
from ...training.apply_pieces import apply_to_model, apply_to_optimizer, on_two_samples
from ...training.data_loader import changed_loader, has_own_batches, rebatched
from ..checks import check_model, check_version, refuse_other_models, tell
from ..loaders import put_at_first_epoch
from .checks import check_job
from .hooks import is_own, unwrap, wrap
from .task import training_loss

_MARK = "_autotune_in_force"
"""On a module that was changed: the settings that it was changed by."""


class PlanCallback(Callback):
    """Applies a plan as ``Trainer.fit`` sets a job up, and says in one line what is applied.

    The model is changed after ``configure_model`` and before ``configure_optimizers``, the optimizer after its state
    is resumed, the training loader as it is asked for; those for validation too, where the plan has a batch for it.
    Fitting again changes nothing that is applied already.

    Raises, from ``Trainer.fit``:
        PlanError: the plan cannot be applied in this job, with the reason and what to do.
    """

    def __init__(self, plan: Plan, *, blocks: Sequence[str] = (), batch_arg_name: str = "batch_size") -> None:
        """
        Args:
            plan: as read by :func:`autotune.load_plan`.
            blocks: module paths, as :class:`autotune.Task` has them.
            batch_arg_name: the attribute of module, datamodule or their hparams that their loaders go by.
        """
        self.plan, self.blocks, self.batch_arg_name = plan, blocks, batch_arg_name
        self._users_loader: Any = None
        """The training loader as the job built it; None until then."""
        self._loader: Any = None
        """A changed one that was asked for to look at its samples, and is handed out next."""
        self._num_steps = 0
        """Optimizer steps whose gradients are cleared."""
        self._notes: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the job, set its batch, and be called once the module has built itself."""
        if stage != "fit":
            return
        check_version("lightning")
        refuse_other_models(self.plan, is_first=True)
        self._notes, self._users_loader, self._loader = [], None, None
        self._turn_off_others(trainer)
        check_job(self.plan, trainer, pl_module)
        if isinstance(trainer.precision_plugin, PlanPrecision):
            trainer.precision_plugin.device = trainer.strategy.root_device.type
        elif self.plan.settings.precision.kind == "default":
            self._notes.append(f"precision {trainer.precision} as the Trainer has it")
        elif "mixed" in trainer.precision:
            self._notes.append("Lightning's own autocast casts weights at each use; trainer_arguments(plan) keeps them")
        self._set_batch(trainer, pl_module)
        self._watch_loader(trainer)
        self._watch_validation(trainer)
        wrap(pl_module, "configure_model", functools.partial(self._configure, trainer, pl_module), is_seen=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take off what was put around the job's own methods; the model stays as it is."""
        unwrap(pl_module, "training_step")
        unwrap(pl_module, "configure_model")
        unwrap(trainer.fit_loop._data_source.instance, "train_dataloader")
        unwrap(trainer.fit_loop.epoch_loop.val_loop._data_source.instance, "val_dataloader")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the plan on the loader that Lightning made of it, if it did (``overfit_batches``)."""
        combined = trainer.fit_loop._combined_loader
        for loader in () if combined is None else combined.flattened:
            put_at_first_epoch(self.plan, loader, trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the plan on the optimizer, whose state is resumed by now, and say what is applied."""
        if len(trainer.optimizers) != 1:
            raise PlanError(f"a plan is for one optimizer, but configure_optimizers made {len(trainer.optimizers)}.")
        (optimizer,) = trainer.optimizers
        changed = apply_to_optimizer(self.plan, optimizer, max_grad_norm=trainer.gradient_clip_val or None)
        if changed is not optimizer:
            trainer.strategy.optimizers = [changed]
        if changed.state:
            changed.load_state_dict(changed.state_dict())  # a fused one's step counts lie on the device
        tell(self.plan, "Lightning", self._notes)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Clear the last step's gradients before forward, as trials do: Lightning has them beside all that forward
        keeps for backward, and clears them between the two."""
        if trainer.global_step != self._num_steps:
            self._num_steps = trainer.global_step
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A model that is compiled and never called is not applied: told before the first step."""
        if isinstance(pl_module._compiled_call_impl, _Noted):
            raise PlanError(
                f"settings.compile: {type(pl_module).__name__}.training_step does not call self(...), so that nothing "
                "that is compiled runs. Call it there, or use kind: blocks."
            )

    def _turn_off_others(self, trainer: Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(one, PlanCallback) and one is not self for one in callbacks):
            raise PlanError("the Trainer has two PlanCallbacks. Give it one plan.")
        others = [one for one in callbacks if isinstance(one, (BatchSizeFinder, GradientAccumulationScheduler))]
        if others and self.plan.settings.batch is not None:
            trainer.callbacks = [one for one in callbacks if one not in others]  # type: ignore[attr-defined]
            self._notes += [f"{type(one).__name__} removed: the batch is the plan's" for one in others]

    def _set_batch(self, trainer: Trainer, module: LightningModule) -> None:
        batch = self.plan.settings.batch
        if batch is None:
            return
        trainer.accumulate_grad_batches = batch.accumulate
        if lightning_hasattr(module, self.batch_arg_name):
            lightning_setattr(module, self.batch_arg_name, batch.micro)

    def _watch_loader(self, trainer: Trainer) -> None:
        source = trainer.fit_loop._data_source
        trainer.fit_loop._combined_loader = None  # a datamodule's setup may have asked for its loader already
        if source.is_module():
            holder: Any = source.instance
            wrap(holder, "train_dataloader", functools.partial(self._change_loader, trainer))
        else:
            source.instance = self._changed_loader(trainer, source.instance)

    def _watch_validation(self, trainer: Trainer) -> None:
        """Have the job validate in the plan's evaluation batch."""
        if (batch := self.plan.evaluation_batch) is None:
            return
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop._combined_loader, source = None, loop._data_source
        if not source.is_module():
            source.instance = _in_batches(batch, source.instance)
        elif is_own(source.instance, "val_dataloader"):
            wrap(source.instance, "val_dataloader", lambda original: _in_batches(batch, original()))

    def _change_loader(self, trainer: Trainer, original: Callable[[], Any]) -> Any:
        kept, self._loader = self._loader, None
        return kept if kept is not None else self._changed_loader(trainer, original())

    def _wants_loader(self) -> bool:
        return self.plan.settings.affect("loader") or self.plan.settings.affect("samples")

    def _changed_loader(self, trainer: Trainer, loader: Any) -> Any:
        self._users_loader = loader
        if isinstance(loader, DataLoader):
            changed = changed_loader(self.plan, loader)
            put_at_first_epoch(self.plan, changed, trainer.strategy.root_device)
            return changed
        if self._wants_loader():
            raise PlanError(
                f"batch and data_loading are for one torch DataLoader, but the training loader is a "
                f"{type(loader).__name__}. Use a DataLoader, or leave both rows out."
            )
        return loader

    def _configure(self, trainer: Trainer, module: LightningModule, original: Callable[[], Any]) -> None:
        """The module builds itself, and is changed."""
        unwrap(module, "configure_model")
        original()
        device = trainer.strategy.root_device
        module.to(device)
        self._choose(trainer, module)
        in_force = self.plan.settings.canonical()
        if vars(module).get(_MARK) != in_force:
            check_model(self.plan, module, self.blocks)
            with undisturbed():
                changed = apply_to_model(self.plan, module, blocks=self.blocks, run=self._run(trainer), device=device)
            if changed is not module:
                raise PlanError(f"{type(changed).__name__} took the module's place, which Lightning cannot train.")
            vars(module)[_MARK] = in_force
            if self.plan.settings.compile.kind == "model":
                module._compiled_call_impl = _Noted(module)
        settings = self.plan.settings.having(Precision())
        wrap(module, "training_step", functools.partial(_step, settings, device.type))

    def _choose(self, trainer: Trainer, module: LightningModule) -> None:
        """The plan is given."""

    def _first_loader(self, trainer: Trainer) -> Any:
        """The training loader as the job built it, which is handed out next."""
        source = trainer.fit_loop._data_source
        if source.is_module() and self._loader is None:
            self._loader = source.dataloader()
        return self._users_loader

    def _run(self, trainer: Trainer) -> Run | None:
        """A training step on two samples, where something looks at it and they can be read again."""
        if not any(one.runs_model for one in self.plan.settings.techniques()):
            return None
        loader = self._first_loader(trainer)
        if not isinstance(loader, DataLoader):
            return None

        def loss(model: torch.nn.Module, batch: Any) -> Any:
            return training_loss(model, batch, getattr(trainer, "datamodule", None))

        return on_two_samples(loader.dataset, loader.collate_fn, loss)


def _in_batches(batch: int, loaders: Any) -> Any:
    """Copies of loaders for validation, with batches of this size.

    Raises:
        PlanError: one makes its batches in a way of its own.
    """
    if isinstance(loaders, (list, tuple)):
        return [_in_batches(batch, one) for one in loaders]
    if isinstance(loaders, Mapping):
        return {name: _in_batches(batch, one) for name, one in loaders.items()}
    if loaders is None or getattr(getattr(loaders, "batch_sampler", None), "batch_size", None) == batch:
        return loaders
    if has_own_batches(loaders):
        raise PlanError(
            f"evaluation.batch: the plan validates in batches of {batch}, which cannot be made of a "
            f"{type(loaders).__name__} that makes its own. Make batches of {batch} there, or leave that row out."
        )
    return rebatched(loaders, batch)


def _step(settings: Settings, device_type: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the precision plugin does not enclose: memory-saving layers answer the loss's own calls."""
    with settings.forward_context(device_type):
        return original(*args, **kwargs)


class _Noted:
    """A compiled call that takes its own place as it is first made."""

    def __init__(self, module: Any) -> None:
        self._module, self._compiled = module, module._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._module._compiled_call_impl = self._compiled
        return self._compiled(*args, **kwargs)


class PlanPrecision(MixedPrecision):
    """Autocast that keeps its casts of the weights within a step, and gradients that may be clipped before an optimizer
    steps that was built fused.

    In Lightning 2.6 neither is so: each use of a weight casts it again, and clipping raises
    (https://github.com/Lightning-AI/pytorch-lightning/issues/21611, and 21435).
    """

    def __init__(self, plan: Plan, device: str | None = None) -> None:
        """
        Args:
            plan: its precision is bf16, fp16 or float8.
            device: torch's device type; None is the plan's, or what there is.

        Raises:
            PlanError: it is another.
        """
        self._technique = plan.settings.precision
        if not self._technique.has_context:
            raise PlanError(
                f"settings.precision.kind: PlanPrecision is for bf16, fp16 and float8, but got "
                f"{self._technique.kind}. Use trainer_arguments(plan)."
            )
        (name,) = self._technique.options_of("Lightning").values()
        device = device or plan.budget.device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(name, device)

    def autocast_context_manager(self) -> torch.autocast:
        """As in a trial."""
        return cast(torch.autocast, self._technique.forward_context(self.device))

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip gradients, a fused optimizer's too: those are not unscaled yet."""
        if self.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            self.scaler.unscale_(optimizer)
        LightningPrecision.clip_gradients(self, optimizer, *args, **kwargs)
