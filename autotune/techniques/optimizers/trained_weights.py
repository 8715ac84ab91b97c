"""Trained weights: kept in bfloat16, updated in fp32 and rounded at random."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...errors import PlanError
from ...units import MIB
from ..support.base import Effect, Run, Stage
from ..support.bits import kept_state
from ..support.bits.kept_state import CLASSES, OF_SHARDS, kept_state_of, obstacles
from ..support.facts import Facts
from ..support.forwards import take_off
from ..support.lossy import Lossy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .. import Settings

_SAVED_BYTES = 4
"""Of a weight and its gradient."""
_AVERAGED = "the task's after_step may average weights, and an average in bf16 stays where it is"
_MOST_SUMMED = 128
"""Gradients that add up in bf16, whose step is a 128th to a 256th: what one adds to more is rounded away."""
_LEAST_BYTES = 32 * MIB
"""What saves less is no reason to trace every combination once more."""


class TrainedWeights(Lossy):
    """In how many bits the weights that train are kept. An update that is too small for them moves some, at random, so
    that all move as they would on average.

    Source: Zamirai et al. 2020, arXiv:2010.06192
    """

    name: ClassVar[str] = "trained_weights"
    goes_by: ClassVar[str | None] = "optimizer state"
    stage: ClassVar[Stage] = Stage.PRECISION
    affects: ClassVar[frozenset[Effect]] = frozenset({"tensors", "code", "function"})
    trades_time: ClassVar[bool] = True
    only_where_listed: ClassVar[bool] = True
    not_in_inference: ClassVar[str] = "nothing is trained"
    not_in_scripts: ClassVar[str] = "the script may read its weights, whose dtype would be another"
    purposes: ClassVar[Mapping[str, str]] = {
        "none": "Leaves weights as they are.",
        "bf16": "Keeps large weights and their gradients in bfloat16, half of their memory, and computes in it. Each "
        "update is made in fp32 and rounded at random, right on average. A moving average of them stays where it is.",
    }

    kind: Literal["none", "bf16"] = "none"
    """``none`` is as the job has them; ``bf16`` is for weights of two dimensions or more, of 4,096 elements or more."""

    def describe(self, facts: Facts | None = None) -> str:
        """``weights in bf16``."""
        return "weights as they are" if self.kind == "none" else f"weights in {self.kind}"

    @classmethod
    def offered(cls, facts: Facts) -> Iterable[TrainedWeights]:
        """Where weights are worth it."""
        return (cls(kind="bf16"),) if facts.num_trainable * _SAVED_BYTES >= _LEAST_BYTES else ()

    def obstacle(self, facts: Facts) -> str | None:
        """It takes a class that updates each element by itself, whole parameters, and bfloat16."""
        if facts.shared_by == "fsdp":
            return OF_SHARDS
        if not facts.device.bf16:
            return f"{facts.device.name} has no bfloat16 arithmetic"
        if facts.optimizer not in CLASSES:
            return f"{facts.optimizer} is not known to update each element by itself"
        if facts.acts_after_step:
            return _AVERAGED
        return "the model has an autocast of its own, to which precision is left" if facts.own_autocast else None

    def beyond_script(self) -> str | None:
        """Nobody knows who reads a script's weights."""
        if self.kind == "none":
            return None
        return (
            "trained_weights changes the dtype of weights that the script may read. Call autotune.apply_to_model and "
            "autotune.apply_to_optimizer in the script, or leave that row out."
        )

    def conflicts(self, settings: Settings) -> str | None:
        """Who computes in another type, or updates weights otherwise."""
        if self.kind == "none":
            return None
        if settings.precision.kind not in ("default", "bf16"):
            return "weights in bf16 are computed with in it: use kind: bf16 or default for precision"
        if settings.parallel.kind in ("fsdp", "tensor"):
            return f"{OF_SHARDS}: use ddp"
        if settings.optimizer_state.kind == "host":
            return "the host's step rounds weights to the nearest: use another kind for optimizer_state"
        if settings.batch is not None and settings.batch.accumulate > _MOST_SUMMED:
            return "gradients of so many micro-batches are lost in a sum in bf16: use larger ones"
        if settings.sparse_gradients.kind != "dense" or settings.lazy_adam.kind != "none":
            return "updates of rows are not rounded at random: use dense gradients"
        return None

    def on_task(self, task: Any) -> Any:
        """As it is.

        Raises:
            PlanError: something averages weights, as far as is known.
        """
        if self.kind == "bf16" and task.after_step is not None:
            raise PlanError(f"settings.trained_weights.kind: bf16: {_AVERAGED}. Use kind: none.")
        return task

    def undo(self, model: nn.Module) -> nn.Module:
        """Weights in fp32 again, as they were rounded."""
        import torch

        names = vars(model).pop("_autotune_trained_weights", ())
        _change(torch.float32, (model.get_parameter(name) for name in names))
        take_off(model, in_bf16)
        return model

    def on_model(self, model: nn.Module, blocks: Sequence[nn.Module], run: Run | None = None) -> nn.Module:
        """Keep its large weights in bfloat16: they stay the parameters that they are. Calls of the model, and of any
        module with such a weight, are in autocast from here on, also outside a training."""
        import torch
        from torch import nn

        if self.kind == "bf16":
            taken = dict(_large(model))
            _change(torch.bfloat16, taken.values())
            model._autotune_trained_weights = tuple(taken)  # type: ignore[assignment]
            device_type, weights = next(model.parameters()).device.type, {id(one) for one in taken.values()}
            for module in model.modules():
                is_free = "forward" not in vars(module) or any(
                    id(p) in weights for p in module.parameters(recurse=False)
                )
                has_some = any(id(p) in weights for p in module.parameters())
                is_called = type(module).forward is not nn.Module.forward  # a list of modules is not
                if module is model or (has_some and is_free and is_called):
                    module.forward = functools.partial(in_bf16, module.forward, device_type)
        return model

    def on_optimizer(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """Have its updates of weights in bfloat16 be made in fp32, with averages in fp32 or what ``optimizer_state``
        says, whose row is put on after this.

        Raises:
            PlanError: it is none of the classes that update each element by itself.
        """
        kept = kept_state_of(optimizer)
        if self.kind == "bf16" and (reason := next(obstacles(optimizer), None)) is not None:
            raise PlanError(f"settings.trained_weights.kind: bf16: {reason}. Use kind: none.")
        if kept is not None:
            kept.rounds = self.kind == "bf16"
        return optimizer

    @property
    def has_context(self) -> bool:
        """Losses compute as the model does."""
        return self.kind == "bf16"

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Autocast to bfloat16."""
        return nullcontext() if self.kind == "none" else _autocast(device_type)


def in_bf16(forward: Callable[..., Any], device_type: str, /, *args: Any, **kwargs: Any) -> Any:
    """What a model's forward returns in autocast."""
    with _autocast(device_type):
        return forward(*args, **kwargs)


def _autocast(device_type: str) -> AbstractContextManager[Any]:
    import torch

    return torch.autocast(device_type, torch.bfloat16)


def _large(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Weights that train, but those of modules that autocast leaves to the types of their inputs, or that want all in
    one type, and of tables of which a step updates some rows alone."""
    import torch
    from torch import nn

    kinds = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear, nn.LayerNorm, nn.RMSNorm)
    left_out = (one for one in model.modules() if isinstance(one, kinds) or getattr(one, "sparse", False) is True)
    others = {id(parameter) for one in left_out for parameter in one.parameters(recurse=False)}
    for name, one in model.named_parameters():
        is_large = one.dim() >= 2 and one.numel() >= kept_state.LEAST and one.requires_grad
        if is_large and type(one) is nn.Parameter and one.dtype is torch.float32 and id(one) not in others:
            yield name, one


def _change(dtype: torch.dtype, weights: Iterable[nn.Parameter]) -> None:
    for one in weights:
        gradient, one.grad = one.grad, None
        one.data = one.data.to(dtype)
        one.grad = None if gradient is None else gradient.to(dtype)
