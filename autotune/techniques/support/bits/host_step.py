"""An optimizer's state in the host's memory: a card's parameters are updated by the CPU, a piece at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..apart import OF_A_SCALER, step_of
from ..pinned import pinned
from .flat import flat, is_dense, of_strides

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FOR_A_CARD = {"capturable": False}
"""Options of a group that no CPU has."""


class HostStep:
    """Updates parameters of a card: a piece of the weights and of their gradients is copied to pinned memory, stepped
    there by the optimizer's own class, and the weights are copied back. The card keeps none of the state, and its
    gradients stay as they are, so that their norm is that of stock."""

    def __init__(self, piece: int, is_planned: bool) -> None:
        """
        Args:
            piece: elements that are copied at once.
            is_planned: for a card that is not here: its memory alone is looked at, and nothing is computed.
        """
        self._piece, self._is_planned = piece, is_planned
        self._rooms: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        """For weights and gradients."""

    def takes(self, parameter: Tensor) -> bool:
        """Whether a parameter is on a card, and its elements are updated each by itself."""
        is_able = parameter.is_floating_point() and parameter.dim() > 0 and is_dense(parameter)
        return is_able and (self._is_planned or parameter.device.type != "cpu")

    def updated(
        self, alone: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, row: dict[str, Any]
    ) -> dict[str, Any]:
        """Update a parameter; its state after that."""
        import torch

        gradient = parameter.grad
        assert gradient is not None, "else nothing calls this"
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        if self._is_planned:
            return row
        group = _on_host(group, parameter.dtype)
        for name in OF_A_SCALER:
            setattr(alone, name, _to_host(getattr(alone, name, None)))
        values, gradients = flat(parameter), flat(gradient)
        full = {name: one for name, one in row.items() if getattr(one, "shape", None) == parameter.shape}
        others = {name: one for name, one in row.items() if name not in full}
        known, after = dict(full), dict(others)  # at its first step the class makes its state
        for start in range(0, values.numel(), self._piece):
            end = min(start + self._piece, values.numel())
            weights, weights.grad = (room[: end - start] for room in self._room(parameter))
            weights.copy_(values[start:end])
            assert weights.grad is not None, "it was set"
            weights.grad.copy_(gradients[start:end])
            state = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in others.items()}
            state |= {name: flat(one)[start:end] for name, one in known.items()}
            after = step_of(alone, group, weights, state)
            for name in [name for name, one in after.items() if getattr(one, "shape", None) == weights.shape]:
                if name not in full:
                    full[name] = of_strides(parameter)
                flat(full[name])[start:end].copy_(after.pop(name))
            values[start:end].copy_(weights)
        return {**after, **full}

    def _room(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Pinned memory for a piece of a parameter and of its gradient."""
        if parameter.dtype not in self._rooms:
            self._rooms[parameter.dtype] = pinned(self._piece, parameter.dtype), pinned(self._piece, parameter.dtype)
        return self._rooms[parameter.dtype]


def _on_host(group: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A group's options for a CPU, which is several times as fast by one kernel for all of an update. In half precision
    that kernel rounds otherwise, and SGD's leaves most weights as they were (torch 2.13)."""
    changed = {name: _to_host(value) for name, value in group.items() if name != "params"}
    changed |= {name: value for name, value in _FOR_A_CARD.items() if name in group}
    if "fused" in group:
        is_wanted = group["fused"] or (group["fused"] is None and not group.get("foreach"))
        changed["fused"] = bool(is_wanted) and dtype.itemsize >= 4
    return {**changed, "params": group["params"]}


def _to_host(value: Any) -> Any:
    import torch

    return value.cpu() if isinstance(value, torch.Tensor) else value
