"""An optimizer's state in fewer bits, or in the host's memory, between its steps. Each step has it in full, a piece of
a parameter at a time."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..apart import step_of, update_apart, update_together
from .flat import flat, is_dense, of_strides
from .host_step import HostStep
from .saved_state import Saved, empty, joined, plain, split, store_of
from .stores import Store, by_noise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST = 4096
"""Elements of a parameter whose state is kept so."""
LEAST_PIECE, _MOST_PIECE, _NUM_PIECES = 2**18, 2**22, 64
"""Elements that are updated at once: the fewest and the most, and about how many pieces all parameters come to. More
would be many kernels, larger ones much memory. Powers of 2, so that whole blocks are in each."""
_SHIFT_BYTES = 2
"""Of the number of elements by which one draw of noise is shifted against another."""
CLASSES = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
"""Of torch's, those that update each element by itself. Left out are those whose state is a sum, to which what a step
adds soon rounds to nothing (Adagrad)."""
OF_SHARDS = "fsdp and tensor share out parameters and their state, which was tried as the optimizer has it alone"
_PRODUCT = "mu_product"
"""Of NAdam's momenta: one number for each parameter, of which its class makes a tensor again."""
_TIMES = "times_written"
"""Beside a parameter's state: how often it was, by which the noise goes."""


class KeptState:
    """Keeps the state of an optimizer's larger parameters in a store, or on the host, and rounds those in bfloat16.

    Those are updated by the optimizer's own class, a piece at a time: every update of these classes is of each element
    by itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind: str | None = None
        """Of stores; None is as the optimizer's class keeps it, unless that is on the host."""
        self.rounds = False
        """Whether weights in bfloat16 are updated in fp32, and rounded by noise; in force once ``use`` is called."""
        self.host: HostStep | None = None
        self._noise: Tensor | None = None
        self._numbers: dict[Tensor, int] = {}
        """Of parameters, in their order."""
        self._piece = LEAST_PIECE
        optimizer.register_state_dict_post_hook(_after_saving)
        optimizer.register_load_state_dict_pre_hook(self._before_loading)
        optimizer.register_load_state_dict_post_hook(self._after_loading)

    def use(self, optimizer: torch.optim.Optimizer, kind: str | None, on_host: bool = False) -> None:
        """Keep the state in a kind of store or on the host from here on, and what there is of it by now, however it was
        kept."""
        from ....internals.fake_tensors import is_planned_for_card
        from ..elsewhere import in_full

        num_elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        was_on_host, self._piece = self.host is not None, piece_of(num_elements)
        self.kind, self._noise = kind, None
        self.host = HostStep(self._piece, is_planned_for_card()) if on_host else None
        update_together(optimizer)
        if self.is_on:
            self.put_on(optimizer, optimizer)
        for parameter, row in optimizer.state.items():
            optimizer.state[parameter] = self._as_saved(in_full(row), was_on_host or self.is_on)
        self._after_loading(optimizer)

    @property
    def is_on(self) -> bool:
        """Whether any of it is kept otherwise than the optimizer's class does."""
        return self.kind is not None or self.host is not None or self.rounds

    def put_on(self, optimizer: torch.optim.Optimizer, owner: torch.optim.Optimizer) -> None:
        """Have an optimizer update what its owner's store keeps: the owner itself, or a copy that shares its state."""
        parameters = (parameter for group in owner.param_groups for parameter in group["params"])
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
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
        is_taken = self.rounds if parameter.dtype is torch.bfloat16 else self.kind is not None
        return is_taken and parameter.dtype in (torch.float32, torch.bfloat16) and is_dense(parameter)

    def _updated(
        self, alone: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, row: dict[str, Any]
    ) -> dict[str, Any]:
        """Update a parameter, piece by piece; its state after that."""
        import torch

        gradient = parameter.grad
        assert gradient is not None, "else nothing calls this"
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        values, gradients = flat(parameter), flat(gradient)
        known, before = split(row)  # at its first step the class makes its state
        kept, times = {name: one for name, one in known.items() if not one.adds_up}, before.pop(_TIMES, 0)
        for start in range(0, values.numel(), self._piece):
            weights = values[start : start + self._piece]
            piece = weights.float()
            piece.grad = gradients[start : start + self._piece].float()
            state = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in before.items()
            }
            state |= {name: one.read(start, start + piece.numel()) for name, one in known.items()}
            after = step_of(alone, group, piece, state)
            del state  # each tensor goes as soon as it is kept
            if piece is not weights:
                weights.copy_(by_noise(piece, self._noise_of((self._numbers.get(parameter), start, times), piece)))
            for name in [name for name, value in after.items() if getattr(value, "shape", None) == piece.shape]:
                if name not in kept:
                    kept[name] = empty(name, self._store_of(name), parameter)
                noise = self._noise_of((self._numbers.get(parameter), start, times, name), piece)
                kept[name].write(start, after.pop(name), noise)
        return joined(kept, {**after, _TIMES: times + 1})

    def _noise_of(self, draw: tuple[object, ...], like: Tensor) -> Tensor:
        """Numbers in [0, 1), the same in every process: of a row of random numbers that lies on a ring, both whose
        start and whose turn are a hash of the draw's name. So those of an element are even over all draws, and know
        nothing of each other.

        Args:
            draw: what is rounded, and when.
            like: has as many elements, of one piece.
        """
        import torch

        num_shifts = 2 ** (8 * _SHIFT_BYTES)
        if self._noise is None or self._noise.device != like.device:
            numbers = torch.rand(self._piece + num_shifts, generator=torch.Generator().manual_seed(0), device="cpu")
            self._noise = numbers.to(like.device)
        hashed = hashlib.blake2b(repr(draw).encode(), digest_size=8).digest()
        start, turn = int.from_bytes(hashed[:_SHIFT_BYTES], "big"), int.from_bytes(hashed[_SHIFT_BYTES:], "big")
        turned: Tensor = self._noise[start : start + like.numel()] + turn / 2 ** (8 * (len(hashed) - _SHIFT_BYTES))
        return turned.frac_()

    def _before_loading(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Have torch hand over what a store keeps, or is to keep, as it is; and all of what is to lie on a card's host,
        which may have no room on the card."""
        from ..disk.updating import is_on_host

        takes_all = self.is_on or any(is_on_host(one) for group in optimizer.param_groups for one in group["params"])
        rows = {key: self._as_saved(row, takes_all) for key, row in state_dict["state"].items()}
        for row in rows.values():
            if self.rounds and hasattr(row.get(_PRODUCT), "item"):  # torch would round a tensor as its parameter is
                row[_PRODUCT] = row[_PRODUCT].item()
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
        from ..disk.updating import is_on_host, move

        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    optimizer.state[parameter] = row = self._loaded(group, parameter, optimizer.state[parameter])
                    if is_on_host(parameter):
                        move(row, parameter)

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

    def _store_of(self, name: str) -> Store:
        return store_of(self.kind or "fp32", name)

    def _stored(self, saved: Saved, parameter: Tensor) -> Saved:
        import torch

        store = self._store_of(saved.name)
        if saved.store is store and saved.strides == parameter.stride():
            return saved.on(parameter)
        made, numbers = empty(saved.name, store, parameter), flat(saved.full(parameter, torch.float32))
        for start in range(0, numbers.numel(), self._piece):
            values = numbers[start : start + self._piece]
            made.write(start, values, self._noise_of((self._numbers.get(parameter), start, saved.name), values))
        return made


def _after_saving(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    numbers = (number for group in state_dict["param_groups"] for number in group["params"])
    by_number, rows = dict(zip(numbers, parameters, strict=True)), state_dict["state"]
    return {**state_dict, "state": {number: plain(row, by_number[number]) for number, row in rows.items()}}


def piece_of(num_elements: int) -> int:
    """How many of an optimizer's elements are updated at once."""
    return max(LEAST_PIECE, min(1 << (num_elements // _NUM_PIECES).bit_length(), _MOST_PIECE))


def obstacles(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Why an optimizer's parameters cannot be updated piece by piece, in words."""
    import torch

    name, groups = type(optimizer).__name__, optimizer.param_groups
    if name not in CLASSES or type(optimizer) is not getattr(torch.optim, name, None):
        yield f"it takes {', '.join(CLASSES)} of torch's own, which update each element by itself, but got {name}"
    if any(group.get("differentiable") for group in groups):
        yield "the optimizer is differentiable, and its state is not kept in full"
    if any(hasattr(parameter, "device_mesh") for group in groups for parameter in group["params"]):
        yield OF_SHARDS


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
