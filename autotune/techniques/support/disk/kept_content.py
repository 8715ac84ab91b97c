"""``Content``: the numbers of a weight, in a file."""

from __future__ import annotations

import copy
import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ....errors import PlanError
from ....internals.fake_tensors import FakeTensor
from .unnamed_file import UnnamedFile, bytes_of


class Store:
    """Where a model's weights lie: a file of this process's alone. A copy of a model has another."""

    def __init__(self) -> None:
        self._file: UnnamedFile | None = None

    def __reduce__(self) -> tuple[type[Store], tuple[()]]:
        return Store, ()

    def file(self) -> UnnamedFile:
        """To write to."""
        self._file = UnnamedFile.to_write(self._file)
        return self._file

    def content(self, numbers: Tensor) -> Content:
        """Of a plain tensor, which is taken over, to be kept here."""
        return Content(numbers, self)

    def note(self, weight: Any, content: Content) -> None:
        """A parameter's numbers are kept here."""


class Content:
    """Numbers that are fetched for whoever reads them, and are there while anybody has them.

    They lie in memory until they are first fetched: a model is moved, loaded and copied as it was built.
    """

    block: int | None = None
    """Of a weight that is fetched with its block's others, that one's number among them."""
    is_state: bool = False
    """Whether they are an optimizer's."""

    def __init__(self, numbers: Tensor, store: Store) -> None:
        """
        Args:
            numbers: of a plain tensor, which is taken over.
            store: of the model.
        """
        self.sign = torch.empty(0, dtype=torch.uint8, device=numbers.device)
        """Without bytes, and a fake tensor where the numbers are."""
        self.copies: list[weakref.ref[Any]] = []
        """Tensors that are to be made of these numbers as they are now."""
        self.store = store
        self._fetched: weakref.ref[Tensor] | None = None
        self._lent: Tensor | None = None
        self._place: _Place | None = None
        self._set(numbers)

    def _set(self, numbers: Tensor) -> None:
        numbers = numbers.detach()
        if numbers.numel() * numbers.element_size() != numbers.untyped_storage().nbytes() or numbers.is_conj():
            numbers = numbers.clone(memory_format=torch.contiguous_format)
        self.size, self.stride, self.dtype = numbers.size(), numbers.stride(), numbers.dtype
        self._held: Tensor | None = None if isinstance(numbers, FakeTensor) else numbers

    def write(self, numbers: Tensor) -> None:
        """Keep other numbers, from :meth:`to_write` or elsewhere."""
        if numbers is not self._lent:
            self._fetched = self._place = None
            self._set(numbers)

    def to_write(self) -> Tensor:
        """All of them, to be written to and then given to :meth:`write`."""
        return self.anew() if self._lent is None else self._lent

    def settle_copies(self, but: Any = None) -> None:
        """Before other numbers are written: copies that are yet to be made of these are made."""
        copies, self.copies = self.copies, []
        for one in (ref() for ref in copies):
            if one is not None and one is not but:
                one.settle()

    @property
    def is_lent(self) -> bool:
        """Whether they are in memory for :meth:`lent`."""
        return self._lent is not None

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """All of them, where whoever writes to them writes to the file.

        Raises:
            UserError: the disk is full.
        """
        self.settle_copies()
        if not isinstance(self.sign, FakeTensor):
            self.to_file()
            if self._place is None or not self._place.file.is_alone:
                self.write(self.anew())
                self.to_file()
        self._fetched, self._lent = None, self._read(to_write=True)
        try:
            yield self._lent
        finally:
            self._lent = None

    def to_file(self) -> None:
        """Have them there, and no longer in memory."""
        if self._held is not None:
            self._place, self._held = _Place(self.store.file(), self._held), None

    def anew(self) -> Tensor:
        """All of them, which nobody else has."""
        if self._lent is not None:
            return self._lent.clone()
        return (self._read() if self._held is None else self._held).clone()

    def stored(self) -> Tensor:
        """All of them, which nobody else has, in the host's memory."""
        return self.anew()

    def moved(self, device: torch.device) -> Content:
        """The same numbers, of a weight on another device.

        Raises:
            PlanError: they are not fetched to that.
        """
        raise PlanError(
            f"settings.offload: a weight of {tuple(self.size)} is offloaded from the CPU's memory, and was to be moved "
            f"to {device}. Use to: host for a model on a card, or kind: none."
        )

    def fetch(self) -> Tensor:
        """All of them, in the memory of their device: not to be written to."""
        if self._lent is not None:
            return self._lent
        found = self._fetched() if self._fetched is not None else None
        if found is None:
            found = self._read()
            self._fetched = weakref.ref(found)
        return found

    def _read(self, to_write: bool = False) -> Tensor:
        if isinstance(self.sign, FakeTensor):
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.sign.device)
        self.to_file()
        assert self._place is not None, "what is not in memory is there"
        mapped = torch.frombuffer(_Mapped.of(self._place, to_write), dtype=self.dtype)
        made: Tensor = torch.ops.aten.lift_fresh(mapped)  # by which dispatch modes see that it is there now
        return made.as_strided(self.size, self.stride)

    def __deepcopy__(self, memo: dict[int, Any]) -> Content:
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(vars(self), sign=copy.deepcopy(self.sign, memo), store=copy.deepcopy(self.store, memo))
        made._fetched = made._lent = made._place = made._held = None
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


class _Mapped(mmap.mmap):
    """A place as memory: pages of the file, which are charged to the process as long as this is there."""

    place: _Place

    @classmethod
    def of(cls, place: _Place, to_write: bool) -> _Mapped:
        """
        Args:
            place: kept meanwhile.
            to_write: what is written goes to the file; else it is nobody else's.
        """
        flags = mmap.MAP_SHARED if to_write else mmap.MAP_PRIVATE
        made = cls(place.file.fileno(), place.num_bytes, flags=flags, offset=place.start)
        made.place = place
        return made
