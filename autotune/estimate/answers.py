"""What tensors without values are told in a rehearsal: which kernels a device would take, and values nobody has."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["SteadyScaler", "Target", "answers", "choose_as_on_cuda"]

Target = Literal["cpu", "cuda"]
"""The device that is planned for."""


def answers(target: Target, is_optimizer: bool = False) -> AbstractContextManager[Any]:
    """In which a part of a step runs over tensors without values.

    Args:
        target: whose kernels are thought of.
        is_optimizer: whether it is the optimizer's.
    """
    stack = ExitStack()
    stack.enter_context(_Answers(target, is_optimizer))
    if target == "cuda":
        stack.enter_context(_Functions())
    return stack


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what tensors without values cannot: which attention kernel a device takes, by their shapes; and in the
    optimizer, whatever value it reads (its number of steps, by which it corrects its averages) is 1."""

    def __init__(self, target: Target, is_optimizer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target = target
        self._is_optimizer = is_optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self._is_optimizer:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten._fused_sdp_choice.default:
            if self._target == "cuda" and not _drops(args, kwargs or {}):
                return SDPBackend.FLASH_ATTENTION.value
            with unset_fake_temporarily():
                args, kwargs = tree_map_only(Tensor, _empty_like, (args, kwargs or {}))
                return func(*args, **kwargs)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Dropout keeps a mask of bytes on CUDA, and of its input's type on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or inplace or not 0.0 < p < 1.0:
            return F.dropout(x, p, training, inplace)
        dropped: Tensor = torch.native_dropout(x, p, True)[0]
        return dropped


def _drops(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an attention drops weights: its mathematical form is taken then, which needs more."""
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def choose_as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Of for-loop and foreach, an optimizer that was not told takes the latter on CUDA."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, requires_grad=x.requires_grad)


class SteadyScaler(torch.amp.GradScaler):
    """A loss scaler whose gradients are finite, without looking."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Never skips."""
        return optimizer.step()

    def update(self, new_scale: Any = None) -> None:
        """The scale stays."""
        self._per_optimizer_states.clear()

    def get_scale(self) -> float:
        """Any: it is not to have fallen."""
        return 1.0
