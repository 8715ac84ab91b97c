"""An optimizer's state in fewer bits between its steps. Each step has it in full, a piece of a parameter at a time."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .few_bits import Store
from .saved_state import Saved, empty, joined, split

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
_OF_A_SCALER = ("grad_scale", "found_inf")
"""What torch.amp.GradScaler gives an optimizer for the time of a step."""


class KeptState:
    """Keeps the state of an optimizer's larger parameters in a store.

    The optimizer stays the object that schedulers, checkpoints and hooks know. Where its ``step`` gathers the
    parameters of a group (``_init_group``), those that are kept so are updated by its own class, a piece at a time, and
    left out. Every update of these classes is of each element by itself.
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
        optimizer.__dict__.pop("_init_group", None)
        if store is not None:
            self.put_on(optimizer, optimizer)
        for parameter, row in optimizer.state.items():
            optimizer.state[parameter] = self._as_saved(row)
        self._after_loading(optimizer)

    def put_on(self, optimizer: torch.optim.Optimizer, owner: torch.optim.Optimizer) -> None:
        """Have an optimizer update what its owner's store keeps: the owner itself, or a copy that shares its state."""
        gather = type(optimizer)._init_group  # type: ignore[attr-defined]
        alone, mine, owners = copy.copy(owner), weakref.ref(optimizer), weakref.ref(owner)

        def gathered(group: dict[str, Any], *lists: Any) -> Any:
            optimizer = mine()
            assert optimizer is not None, "it is stepped now"
            for name in _OF_A_SCALER:
                setattr(alone, name, getattr(owners(), name, None))
            others = []
            for parameter in group["params"]:
                gradient = parameter.grad
                if not self._keeps(parameter) or (gradient is not None and gradient.is_sparse):
                    others.append(parameter)
                elif gradient is not None:
                    optimizer.state[parameter] = self._updated(alone, group, parameter, optimizer.state[parameter])
            return gather(optimizer, {**group, "params": others}, *lists)

        optimizer._init_group = gathered  # type: ignore[attr-defined]

    def _keeps(self, parameter: Tensor) -> bool:
        """Whether the store has a parameter's state."""
        import torch

        is_large = parameter.numel() >= LEAST and parameter.dtype is torch.float32
        return self.store is not None and is_large and _is_dense(parameter)

    def _updated(
        self, alone: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, row: Any
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
            alone.state, alone.param_groups = defaultdict(dict, {piece: state}), [{**group, "params": [piece]}]
            _step(alone)
            after = dict(alone.state[piece])
            for name in [name for name, value in after.items() if getattr(value, "shape", None) == piece.shape]:
                if name not in kept:
                    kept[name] = empty(name, self.store, parameter)
                kept[name].write(start, after.pop(name), self._noise_of(times, piece))
        alone.state, alone.param_groups = defaultdict(dict), []
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


def _step(optimizer: torch.optim.Optimizer) -> None:
    """A step that hooks of every optimizer's steps are not told of."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


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
