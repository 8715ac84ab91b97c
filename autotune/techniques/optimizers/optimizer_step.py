"""Optimizer step: once backward has ended, or within it, so that not all gradients are there at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...errors import PlanError
from ...units import MIB
from ..support.base import Effect, Stage, Technique
from ..support.bits.kept_state import twin
from ..support.facts import Facts

if TYPE_CHECKING:
    import torch

    from .. import Settings

_CLASSES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SparseAdam",
)  # fmt: skip
"""torch's own that update each parameter by itself: of those, only L-BFGS does not."""
_GRADIENT_BYTES = 4
"""Of a parameter in fp32."""
_LEAST_BYTES = 32 * MIB
"""Gradients that take less are no reason to trace every combination once more."""


class OptimizerStep(Technique):
    """When the optimizer updates a parameter: after backward, or as soon as its gradient is whole.

    Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    """

    name: ClassVar[str] = "optimizer_step"
    not_in_inference: ClassVar[str] = "there is no optimizer"
    goes_by: ClassVar[str | None] = "steps in backward"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors"})
    trades_time: ClassVar[bool] = True
    adds_up: ClassVar[Literal["whole"]] = "whole"
    not_in_scripts: ClassVar[str] = "the script may clip or log gradients, which would be gone"
    purposes: ClassVar[Mapping[str, str]] = {
        "in_backward": "Updates each parameter within backward, and frees its gradient at once; the same arithmetic.",
    }

    kind: Literal["after_backward", "in_backward"] = "after_backward"
    """``after_backward`` is stock; ``in_backward`` updates each parameter by itself, and frees its gradient at once."""

    def describe(self, facts: Facts | None = None) -> str:
        """``optimizer step in backward``."""
        return f"optimizer step {self.kind.replace('_', ' ')}"

    @classmethod
    def choices(cls, facts: Facts) -> tuple[OptimizerStep, ...]:
        """Both where the optimizer updates each parameter by itself, and all gradients together are worth freeing."""
        other = cls(kind="in_backward")
        is_worth = facts.num_trainable * _GRADIENT_BYTES >= _LEAST_BYTES and other.unavailable(facts) is None
        return (cls(), other) if is_worth else (cls(),)

    def unavailable(self, facts: Facts) -> str | None:
        """It takes an optimizer that updates each parameter by itself, and gradients that are not clipped."""
        if self.kind == "after_backward":
            return None
        if facts.optimizer not in _CLASSES:
            return f"{facts.optimizer} is not known to update each parameter by itself"
        return None if facts.max_grad_norm is None else "gradients are clipped by the norm of all of them"

    @property
    def frees_gradients(self) -> bool:
        """Each, as it has been used."""
        return self.kind == "in_backward"

    def beyond_script(self) -> str | None:
        """Nobody knows what a loop does with gradients."""
        if self.kind == "after_backward":
            return None
        return (
            "optimizer_step: in_backward frees gradients before the script could clip or log them. Call "
            "autotune.apply_to_optimizer(plan, optimizer) in a script that does neither, or leave that row out."
        )

    def conflicts(self, settings: Settings) -> str | None:
        """Gradients that are whole after several backward passes, or once a loss scaler has seen them all."""
        if self.kind == "after_backward":
            return None
        if settings.batch is not None and settings.batch.accumulate > 1:
            return "in_backward frees each gradient at once, and accumulation adds them up: use accumulate 1"
        if any(one.scales_loss for one in settings.techniques()):
            return "in_backward updates before the loss scaler has seen all gradients: use bf16"
        return None

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """Have each parameter updated in backward; ``optimizer.step()`` then finds no gradients, and does nothing.

        The optimizer stays the object that schedulers, checkpoints and hooks know: an update goes by its state and its
        groups as they are at that moment.

        Raises:
            PlanError: the optimizer is none that updates each parameter by itself, or something wants all gradients.
        """
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if (handle := _handles().pop(parameter, None)) is not None:
                handle.remove()
        if self.kind == "after_backward":
            return optimizer
        _check(optimizer, max_grad_norm)
        alone = twin(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    update = _Update(optimizer, alone, number)
                    _handles()[parameter] = parameter.register_post_accumulate_grad_hook(update)
        return optimizer


class _Update:
    """Steps one parameter of a group alone, whose gradient has just become whole."""

    def __init__(self, optimizer: torch.optim.Optimizer, alone: torch.optim.Optimizer, number: int) -> None:
        self._optimizer, self._alone, self._number = optimizer, alone, number

    def __call__(self, parameter: torch.Tensor) -> None:
        """The groups and the state are looked up each time: ``load_state_dict`` replaces both.

        Raises:
            PlanError: there are several ranks, which would each go by a gradient of their own.
        """
        from ..support.disk.updating import in_memory

        if (num_ranks := _num_ranks(parameter)) > 1:
            raise PlanError(
                f"settings.optimizer_step.kind: in_backward: there are {num_ranks} ranks, and in one training each "
                "would update its parameters before gradients are averaged over them. Use kind: after_backward; "
                "where each rank trains by itself, form no process group."
            )
        group = self._optimizer.param_groups[self._number]
        self._alone.state = self._optimizer.state
        self._alone.param_groups = [{**group, "params": [parameter]}]
        with in_memory(parameter, self._optimizer):
            self._alone.step()
        parameter.grad = None


def _num_ranks(parameter: torch.Tensor) -> int:
    """That a parameter's gradient is still to be averaged over: FSDP's, a DTensor, is by then."""
    from torch import distributed

    if hasattr(parameter, "device_mesh"):
        return 1
    is_there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_there else 1


@functools.cache
def _handles() -> MutableMapping[torch.Tensor, Any]:
    """Of each parameter that has a hook of ours, what takes it off."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def _check(optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
    reason = next(_obstacles(optimizer, max_grad_norm), None)
    if reason is not None:
        raise PlanError(f"settings.optimizer_step.kind: in_backward: {reason}. Use kind: after_backward.")


def _obstacles(optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Iterator[str]:
    import torch

    name = type(optimizer).__name__
    if name not in _CLASSES or type(optimizer) is not getattr(torch.optim, name, None):
        yield f"it takes an optimizer of torch's own that updates each parameter by itself, but got {name}"
    if max_grad_norm is not None:
        yield f"the norm of all gradients is to be clipped at {max_grad_norm:g}, and they are never there at once"
    if optimizer._optimizer_step_pre_hooks:
        yield "the optimizer has step pre-hooks, which would find no gradients"
