"""An optimizer's state in fewer bits, or in the host's memory, between its steps. Each step has it in full, a piece of
a parameter at a time."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..apart import step_of, update_apart, update_together
from .flat import flat, is_dense, of_strides
from .host_step import HostStep
from .saved_state import Saved, empty, joined, split
from .stores import Store

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST = 4096
"""Elements of a parameter whose state is kept so."""
LEAST_PIECE, _MOST_PIECE, _NUM_PIECES = 2**18, 2**22, 64
"""Elements that are updated at once: the fewest and the most, and about how many pieces all parameters come to. More
would be many kernels, larger ones much memory. Powers of 2, so that whole blocks are in each."""
_NOISE = 2**16
"""By how many numbers the noise of one step may be shifted against that of another."""
_TIMES = "times_written"
"""Beside a parameter's state: how often it was, by which the noise goes."""


class KeptState:
    """Keeps the state of an optimizer's larger parameters in a store, or on the host.

    Those are updated by the optimizer's own class, a piece at a time: every update of these classes is of each element
    by itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.store: Store | None = None
        """None is as the optimizer's class keeps it, unless that is on the host."""
        self.host: HostStep | None = None
        self._noise: Tensor | None = None
        self._piece = LEAST_PIECE
        optimizer.register_load_state_dict_pre_hook(self._before_loading)
        optimizer.register_load_state_dict_post_hook(self._after_loading)

    def use(self, optimizer: torch.optim.Optimizer, store: Store | None, on_host: bool = False) -> None:
        """Keep the state in a store or on the host from here on, and what there is of it by now, however it was
        kept."""
        from ....internals.fake_tensors import is_planned_for_card

        num_elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        was_on_host, self._piece = self.host is not None, piece_of(num_elements)
        self.store, self._noise = store, None
        self.host = HostStep(self._piece, is_planned_for_card()) if on_host else None
        update_together(optimizer)
        if self.is_on:
            self.put_on(optimizer, optimizer)
        for parameter, row in optimizer.state.items():
            optimizer.state[parameter] = self._as_saved(row, was_on_host or self.is_on)
        self._after_loading(optimizer)

    @property
    def is_on(self) -> bool:
        """Whether any of it is kept otherwise than the optimizer's class does."""
        return self.store is not None or self.host is not None

    def put_on(self, optimizer: torch.optim.Optimizer, owner: torch.optim.Optimizer) -> None:
        """Have an optimizer update what its owner's store keeps: the owner itself, or a copy that shares its state."""
        update_apart(optimizer, owner, self._takes, self._updated if self.host is None else self.host.updated)

    def _takes(self, parameter: Tensor) -> bool:
        return self._keeps(parameter) and (parameter.grad is None or not parameter.grad.is_sparse)

    def _keeps(self, parameter: Tensor) -> bool:
        """Whether the store, or the host, has a parameter's state."""
        import torch

        if parameter.numel() < LEAST:
            return False
        if self.host is not None:
            return self.host.takes(parameter)
        return self.store is not None and parameter.dtype is torch.float32 and is_dense(parameter)

    def _updated(
        self, alone: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, row: dict[str, Any]
    ) -> dict[str, Any]:
        """Update a parameter, piece by piece; its state after that."""
        import torch

        assert self.store is not None, "else nothing calls this"
        gradient = parameter.grad
        assert gradient is not None, "else nothing calls this"
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        values, gradients = flat(parameter), flat(gradient)
        kept, before = split(row)
        known, times = dict(kept), before.pop(_TIMES, 0)  # at its first step the class makes its state
        for start in range(0, values.numel(), self._piece):
            piece = values[start : start + self._piece]
            piece.grad = gradients[start : start + self._piece]
            state = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in before.items()
            }
            state |= {name: one.read(start, start + piece.numel()) for name, one in known.items()}
            after = step_of(alone, group, piece, state)
            del state  # each tensor goes as soon as it is kept
            for name in [name for name, value in after.items() if getattr(value, "shape", None) == piece.shape]:
                if name not in kept:
                    kept[name] = empty(name, self.store, parameter)
                kept[name].write(start, after.pop(name), self._noise_of(times, piece))
        return joined(kept, {**after, _TIMES: times + 1})

    def _noise_of(self, times: int, like: Tensor) -> Tensor:
        """Numbers in [0, 1), others each time: multiples of the golden ratio, which spread evenly over elements and
        steps, and are the same in every process."""
        import torch

        if self._noise is None or self._noise.device != like.device:
            numbers = torch.arange(self._piece + _NOISE, dtype=torch.float64, device=like.device)
            self._noise = numbers.mul_((5**0.5 - 1) / 2).frac_().float()
        start = times * 40_503 % _NOISE
        return self._noise[start : start + like.numel()]

    def _before_loading(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Have torch hand over what a store keeps, or is to keep, as it is."""
        rows = {key: self._as_saved(row, self.is_on) for key, row in state_dict["state"].items()}
        return {**state_dict, "state": rows}

    def _as_saved(self, row: dict[str, Any], takes_all: bool) -> dict[str, Any]:
        import torch

        kept, others = split(row)
        for name, value in others.items():
            if takes_all and isinstance(value, torch.Tensor) and value.numel() >= LEAST and value.dim():
                kept[name] = Saved(name, {name: value})
        return {**others, **kept}

    def _after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what was handed over as this optimizer does, whoever saved it."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    optimizer.state[parameter] = self._loaded(group, parameter, optimizer.state[parameter])

    def _loaded(self, group: dict[str, Any], parameter: Tensor, row: dict[str, Any]) -> dict[str, Any]:
        saved = {name: one for name, one in row.items() if isinstance(one, Saved)}
        others = {name: value for name, value in row.items() if name not in saved}
        if self._keeps(parameter) and self.host is not None:
            others.pop(_TIMES, None)
            counted = {name: value.cpu() for name, value in others.items() if hasattr(value, "cpu")}
            return others | counted | {name: one.full(of_strides(parameter)) for name, one in saved.items()}
        if saved and (group.get("fused") or group.get("capturable")):  # as torch has it, which has loaded no other
            others |= {"step": others["step"].to(parameter.device)} if "step" in others else {}
        if self._keeps(parameter):
            return joined({name: self._stored(one, parameter) for name, one in saved.items()}, others)
        if saved:
            others.pop(_TIMES, None)
        return others | {name: one.full(parameter) for name, one in saved.items()}

    def _stored(self, saved: Saved, parameter: Tensor) -> Saved:
        assert self.store is not None, "else nothing calls this"
        if saved.store is self.store and saved.strides == parameter.stride():
            return saved.on(parameter)
        made, numbers = empty(saved.name, self.store, parameter), flat(saved.full(parameter))
        for start in range(0, numbers.numel(), self._piece):
            values = numbers[start : start + self._piece]
            made.write(start, values, self._noise_of(0, values))
        return made


def piece_of(num_elements: int) -> int:
    """How many of an optimizer's elements are updated at once."""
    return max(LEAST_PIECE, min(1 << (num_elements // _NUM_PIECES).bit_length(), _MOST_PIECE))


def kept_state_of(optimizer: torch.optim.Optimizer) -> KeptState | None:
    """An optimizer's; None where it is a wrapper without the hooks of one."""
    kept: KeptState | None = getattr(optimizer, "_autotune_kept_state", None)
    if kept is None:
        with suppress(AttributeError):
            kept = optimizer._autotune_kept_state = KeptState(optimizer)  # type: ignore[attr-defined]
    return kept


def twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy without the user's hooks, for steps of single parameters; it is given the state and a group each time."""
    alone = copy.copy(optimizer)
    kept = kept_state_of(optimizer)
    if kept is not None and kept.is_on:
        kept.put_on(alone, optimizer)
    return alone
