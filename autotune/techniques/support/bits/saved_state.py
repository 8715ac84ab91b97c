"""What a state dict has of an optimizer's state that is kept in fewer bits, and its numbers in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .stores import BFloat16, Codes, Codes4, Factors, Fields, Float32, Store

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STORES: Mapping[str, Store] = {"bf16": BFloat16(), "8bit": Codes(), "4bit": Codes4(), "factored": Factors()}
"""By the kind of ``optimizer_state``."""
_ALL: Mapping[str, Store] = {**STORES, "fp32": Float32()}
"""The last is for weights in bfloat16, whose optimizer would keep its state in that too."""
_PIECE = 2**20
"""Elements of a parameter that are had in full at once: a multiple of every block's size."""
_ORDER = "strides"
"""Beside the fields: the order in memory of the parameter's elements, in which they are."""
_NOT_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg")
"""Names of averages and maxima of squares or magnitudes."""


@dataclass(frozen=True)
class Saved:
    """One tensor of a parameter's state: as a store keeps it, or as it is."""

    name: str
    """Of the tensor."""
    fields: Fields
    """By the store's names."""
    store: Store | None = None
    """None where it is the tensor itself."""
    strides: tuple[int, ...] = ()
    """Of the parameter, in whose order in memory a store has its elements."""

    @property
    def is_signed(self) -> bool:
        """Whether a number may be below 0."""
        return self.name not in _NOT_NEGATIVE

    @property
    def adds_up(self) -> bool:
        """Whether a step writes it anew."""
        return self.store is not None and self.store.adds_up

    def full(self, parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """All its numbers, in the order of its parameter, and in its dtype or another."""
        import torch

        if self.store is None and (value := self.fields[self.name]).shape != parameter.shape:
            return value.to(parameter.device, dtype or parameter.dtype)
        made = torch.empty_like(_room(parameter), dtype=dtype, device=parameter.device)
        if self.store is None:
            return made.copy_(value)
        numbers = torch.empty(parameter.numel(), device=parameter.device)
        here = self.on(parameter)
        for start in range(0, numbers.numel(), _PIECE):
            numbers[start : start + _PIECE] = here.read(start, min(start + _PIECE, numbers.numel()))
        return made.copy_(numbers.as_strided(parameter.shape, self.strides))

    def on(self, parameter: Tensor) -> Saved:
        """The same where its parameter is."""
        return replace(self, fields={name: field.to(parameter.device) for name, field in self.fields.items()})

    def read(self, start: int, end: int) -> Tensor:
        """The numbers from one place to another, in fp32."""
        assert self.store is not None, "the caller sees to it"
        return self.store.read(self.fields, start, end, self.is_signed)

    def write(self, start: int, values: Tensor, noise: Tensor) -> None:
        """Keep numbers from a place on, rounded by noise."""
        assert self.store is not None, "the caller sees to it"
        self.store.write(self.fields, start, values.float(), self.is_signed, noise)


def _room(parameter: Tensor) -> Tensor:
    """Whose shape, strides and dtype are the parameter's: one that is elsewhere is not fetched for those."""
    import torch

    from ..elsewhere import Elsewhere

    if not isinstance(parameter, Elsewhere):
        return parameter
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")


def empty(name: str, store: Store, parameter: Tensor) -> Saved:
    """Room for one tensor of a parameter's state."""
    return Saved(name, store.empty(parameter), store, parameter.stride())


def store_of(kind: str, name: str) -> Store:
    """What keeps one tensor of the state by a kind: factors are of squares, beside which 8 bits keep the others. In 4
    bits, what is small in its block is rounded up to a 49th of the largest; over the root of a small column's mean,
    that came to thousands of learning rates."""
    return _ALL["8bit" if kind == "factored" and name not in _NOT_NEGATIVE else kind]


def plain(row: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """A parameter's state in which what is kept as it is goes by torch's names, so that torch alone reads it."""
    from ..elsewhere import in_full

    kept, others = split(in_full(row, to_save=True))
    whole = [name for name, one in kept.items() if isinstance(one.store, Float32)]
    views = {name: kept[name].fields["float32"].as_strided(parameter.shape, kept[name].strides) for name in whole}
    return joined({name: one for name, one in kept.items() if name not in views}, {**others, **views})


def split(row: Mapping[str, Any]) -> tuple[dict[str, Saved], dict[str, Any]]:
    """A parameter's state as :func:`joined` made it: what a store keeps, by name, and the rest."""
    import torch

    others, found = dict(row), {}
    strides = tuple(others.pop(_ORDER, ()))
    for key in row:
        name, _, mark = key.rpartition(".") if isinstance(key, str) else ("", "", "")
        store = next((store for store in _ALL.values() if mark == next(iter(store.fields))), None)
        if store is not None:  # loaded before a plan was applied, they have the parameter's dtype
            fields = {one: others.pop(f"{name}.{one}").to(getattr(torch, dtype)) for one, dtype in store.fields.items()}
            found[name] = Saved(name, fields, store, strides)
    return found, others


def joined(kept: Mapping[str, Saved], others: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state as a flat dict of tensors and numbers, as state dicts have it."""
    row = dict(others)
    for name, one in kept.items():
        row |= {f"{name}.{field}": value for field, value in one.fields.items()}
        row[_ORDER] = one.strides
    return row
