"""``StandIns``: copies of a user's model and optimizer without their values, for steps that are only traced."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Caught, TaskError

_FEW = 2**16
"""Elements up to which a buffer's values are copied: masks and positions that a forward may ask for."""
_PLAIN = (Tensor, nn.Parameter)


class StandIns:
    """Builds copies on the CPU, as the functions of a task.

    Parameters are memory that nothing touches, and so takes nothing. What the optimizer keeps is left out: its first
    step makes it anew.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None
    ) -> None:
        """
        Args:
            model: copied at each call.
            optimizer: of its parameters, or a function of the parameters; None is AdamW.
        """
        self._model, self._optimizer = model, optimizer
        self._copied: torch.optim.Optimizer | None = None

    def build_model(self) -> nn.Module:
        """A copy without values.

        Raises:
            TaskError: the model holds something that cannot be copied.
        """
        return self._pair(_without_values)

    def build_real_model(self) -> nn.Module:
        """A copy with its values.

        Raises:
            TaskError: it cannot be copied, or there are no values.
        """
        if any(tensor.is_meta for tensor in self._model.parameters()):
            raise TaskError(
                "fit: the model reads values, and this one has none (its parameters are on the meta device). Build it "
                "on the CPU."
            )
        return self._pair(_on_cpu)

    @property
    def build_optimizer(self) -> Callable[[Any], torch.optim.Optimizer] | None:
        """Builds that of the copy which was built last, as a task's ``build_optimizer``; None is AdamW."""
        return self._of_copy if isinstance(self._optimizer, torch.optim.Optimizer) else self._optimizer

    def _of_copy(self, parameters: Any) -> torch.optim.Optimizer:
        copied, self._copied = self._copied, None
        assert copied is not None, "it is copied with the model"
        return copied

    def _pair(self, copied: Callable[[Tensor], Tensor]) -> nn.Module:
        """The model, and the optimizer where one was given, with each of their tensors copied by a function."""
        given = self._optimizer if isinstance(self._optimizer, torch.optim.Optimizer) else None
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())
        memo: dict[int, Any] = {id(one): copied(one) for one in tensors if type(one) in _PLAIN}
        if given is not None:
            memo[id(given.state)] = defaultdict(dict)
        with Caught() as raised:
            model, self._copied = copy.deepcopy((self._model, given), memo)
            return model
        error = raised.take()
        raise TaskError(
            f"fit: the model cannot be copied, and its own must not be touched before the choice is made: "
            f"copy.deepcopy raised {type(error).__name__}: {error}. Take out of it what cannot be copied (a lock, a "
            "generator, an open file), and put it back afterwards."
        )


def _without_values(tensor: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    if not is_parameter and not tensor.is_meta and tensor.numel() <= _FEW:
        return tensor.detach().to("cpu", copy=True)
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return _like(tensor, made)


def _on_cpu(tensor: Tensor) -> Tensor:
    return _like(tensor, tensor.detach().to("cpu", copy=True))


def _like(tensor: Tensor, made: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return made.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(made, tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
