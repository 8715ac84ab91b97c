"""``Content``: the numbers of a weight, in a file."""

from __future__ import annotations

import copy
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from ....internals.fake_tensors import FakeTensor
from .unnamed_file import UnnamedFile, bytes_of


class Store:
    """Where a model's weights lie: one file in each process. A copy of a model has another."""

    def __init__(self) -> None:
        self._file: UnnamedFile | None = None

    def __reduce__(self) -> tuple[type[Store], tuple[()]]:
        return Store, ()

    def file(self) -> UnnamedFile:
        """This process's: one that was forked reads its parent's, and writes to its own."""
        if self._file is None or self._file.pid != os.getpid():
            self._file = UnnamedFile()
        return self._file


class Content:
    """Numbers that are fetched for whoever reads them, and are there while anybody has them.

    They lie in memory until they are first fetched: a model is moved, loaded and copied as it was built.
    """

    def __init__(self, numbers: Tensor, store: Store) -> None:
        """
        Args:
            numbers: of a plain tensor on the CPU, which is taken over.
            store: of the model.
        """
        self.sign = torch.empty(0, dtype=torch.uint8, device=numbers.device)
        """Without bytes, and a fake tensor where the numbers are."""
        self.copies: list[weakref.ref[Any]] = []
        """Tensors that are to be made of these numbers as they are now."""
        self.store = store
        self._fetched: weakref.ref[Tensor] | None = None
        self._place: _Place | None = None
        self._set(numbers)

    def _set(self, numbers: Tensor) -> None:
        numbers = numbers.detach()
        if numbers.numel() * numbers.element_size() != numbers.untyped_storage().nbytes() or numbers.is_conj():
            numbers = numbers.clone(memory_format=torch.contiguous_format)
        self.size, self.stride, self.dtype = numbers.size(), numbers.stride(), numbers.dtype
        self._held: Tensor | None = None if isinstance(numbers, FakeTensor) else numbers

    def write(self, numbers: Tensor) -> None:
        """Keep other numbers."""
        self._fetched = self._place = None
        self._set(numbers)

    def anew(self) -> Tensor:
        """All of them, to be written to."""
        return (self._read() if self._held is None else self._held).clone()

    def fetch(self) -> Tensor:
        """All of them, in the memory of their device: not to be written to."""
        found = self._fetched() if self._fetched is not None else None
        if found is None:
            found = self._read()
            self._fetched = weakref.ref(found)
        return found

    def _read(self) -> Tensor:
        if isinstance(self.sign, FakeTensor):
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.sign.device)
        if self._place is None:
            assert self._held is not None
            self._place, self._held = _Place(self.store.file(), self._held), None
        made = torch.empty(self._place.num_bytes, dtype=torch.uint8)
        self._place.file.read(bytes_of(made), self._place.start)
        return made.view(self.dtype).as_strided(self.size, self.stride)

    def __deepcopy__(self, memo: dict[int, Any]) -> Content:
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(vars(self), sign=copy.deepcopy(self.sign, memo), store=copy.deepcopy(self.store, memo))
        made._fetched = made._place = made._held = None
        made.copies = []
        if not isinstance(made.sign, FakeTensor):
            made._held = self.anew()
        return made

    def __reduce__(self) -> Any:
        return Content, (self.anew(), self.store)


class _Place:
    """Of a tensor's memory in a file, until this is gone."""

    def __init__(self, file: UnnamedFile, held: Tensor) -> None:
        self.file, self.num_bytes = file, held.untyped_storage().nbytes()
        with torch._C._DisableTorchDispatch():
            self.start = file.write(bytes_of(torch.empty(0, dtype=torch.uint8).set_(held.untyped_storage())))
        weakref.finalize(self, file.give_back, self.start, self.num_bytes)
