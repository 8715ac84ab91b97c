"""An optimizer's state in fewer bits between its steps. Each step has it in full, a piece of a parameter at a time."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..apart import step_of, update_apart, update_together
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
    """Keeps the state of an optimizer's larger parameters in a store.

    Those are updated by the optimizer's own class, a piece at a time: every update of these classes is of each element
    by itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.store: Store | None = None
        """None is as the optimizer's class keeps it."""
        self._noise: Tensor | None = None
        self._piece = LEAST_PIECE
        optimizer.register_load_state_dict_pre_hook(self._before_loading)
        optimizer.register_load_state_dict_post_hook(self._after_loading)

    def use(self, optimizer: torch.optim.Optimizer, store: Store | None) -> None:
        """Keep the state in a store from here on, and what there is of it by now, however it was kept."""
        self.store, self._noise = store, None
        num_elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        self._piece = max(LEAST_PIECE, min(2 ** (num_elements // _NUM_PIECES).bit_length(), _MOST_PIECE))
        update_together(optimizer)
        if store is not None:
            self.put_on(optimizer, optimizer)
        for parameter, row in optimizer.state.items():
            optimizer.state[parameter] = self._as_saved(row)
        self._after_loading(optimizer)

    def put_on(self, optimizer: torch.optim.Optimizer, owner: torch.optim.Optimizer) -> None:
        """Have an optimizer update what its owner's store keeps: the owner itself, or a copy that shares its state."""
        update_apart(optimizer, owner, self._takes, self._updated)

    def _takes(self, parameter: Tensor) -> bool:
        return self._keeps(parameter) and (parameter.grad is None or not parameter.grad.is_sparse)

    def _keeps(self, parameter: Tensor) -> bool:
        """Whether the store has a parameter's state."""
        import torch

        is_large = parameter.numel() >= LEAST and parameter.dtype is torch.float32
        return self.store is not None and is_large and _is_dense(parameter)

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
        values, gradients = _flat(parameter), _flat(gradient)
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
        rows = {key: self._as_saved(row) for key, row in state_dict["state"].items()}
        return {**state_dict, "state": rows}

    def _as_saved(self, row: dict[str, Any]) -> dict[str, Any]:
        import torch

        kept, others = split(row)
        for name, value in others.items():
            if self.store is not None and isinstance(value, torch.Tensor) and value.numel() >= LEAST:
                kept[name] = Saved(name, {name: value})
        return {**others, **kept}

    def _after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what was handed over as this optimizer does, whoever saved it."""
        for parameter, row in optimizer.state.items():
            saved = {name: one for name, one in row.items() if isinstance(one, Saved)}
            others = {name: value for name, value in row.items() if name not in saved}
            if self._keeps(parameter):
                kept = {name: self._stored(one, parameter) for name, one in saved.items()}
                optimizer.state[parameter] = joined(kept, others)
            elif saved:
                others.pop(_TIMES, None)
                optimizer.state[parameter] = others | {name: one.full(parameter) for name, one in saved.items()}

    def _stored(self, saved: Saved, parameter: Tensor) -> Saved:
        assert self.store is not None, "else nothing calls this"
        if saved.store is self.store and saved.strides == parameter.stride():
            return saved.on(parameter)
        made, numbers = empty(saved.name, self.store, parameter), _flat(saved.full(parameter))
        for start in range(0, numbers.numel(), self._piece):
            values = numbers[start : start + self._piece]
            made.write(start, values, self._noise_of(0, values))
        return made


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
    if kept is not None and kept.store is not None:
        kept.put_on(alone, optimizer)
    return alone


def _flat(tensor: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """Whether they lie there without gaps, each once."""
    expected = 1
    for stride, side in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if side > 1 and stride != expected:
            return False
        expected *= side
    return True
