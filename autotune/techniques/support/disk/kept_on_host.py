"""``HostContent``: the numbers of a card's weight, or of its state in an optimizer, in the host's pinned memory. They
come to the card two blocks before they are read, on a stream of their own, and leave it once their block has computed.

Source: Ren et al. 2021, arXiv:2101.06840 (ZeRO-Offload); CUDA's streams:
https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import PlanError
from ....internals.fake_tensors import FakeTensor, is_planned_for_card
from ..pinned import pinned, pinned_bytes, split
from .block_order import BlockOrder, Visit
from .copies import Copies, Flight, Planned
from .kept_content import Content, Store
from .offloaded_weight import OffloadedWeight
from .saved_elsewhere import bytes_in
from .unnamed_file import bytes_of


class HostStore(Store):
    """Pinned memory, and which blocks' weights are on the card: those of the one that computes, and of the two that
    come next."""

    def __init__(self, in_inference: bool, is_planned: bool | None = None) -> None:
        """
        Args:
            in_inference: whether no backward follows a forward.
            is_planned: for a card that is not here: its memory alone is looked at. None is as plans are applied now.
        """
        super().__init__()
        self._in_inference = in_inference
        self.is_planned = is_planned_for_card() if is_planned is None else is_planned
        self._copies: Copies | None = None
        self._weights: dict[int, list[weakref.ref[OffloadedWeight]]] = defaultdict(list)
        """By block."""
        self._has_state = False
        self._there: tuple[int, ...] = ()
        """Blocks whose weights are on the card, or on their way."""
        self._order = BlockOrder(in_inference, learns=not self.is_planned)  # planned steps are alike, the first too

    def __reduce__(self) -> Any:
        return type(self), (self._in_inference, self.is_planned)

    def content(self, numbers: Tensor) -> Content:
        """As every store's."""
        return HostContent(numbers, self)

    def note(self, weight: OffloadedWeight, content: Content) -> None:
        """It comes and leaves with its block's others."""
        if content.block is not None:
            there = [one for one in self._weights[content.block] if one() is not None]
            self._weights[content.block] = [*there, weakref.ref(weight)]
            self._has_state |= content.is_state

    def copies(self, device: torch.device) -> Copies:
        """To that card."""
        if self._copies is None or self._copies.device != device:
            self._copies = (Planned if self.is_planned else Copies)(device)
        return self._copies

    def come_to(self, block: int) -> None:
        """A weight of this block is read: have those that come next on their way, and the others off the card."""
        if not self._order.is_at(block):
            self._keep(self._order.coming(max(self._weights) + 1))

    def leave(self) -> None:
        """All of them, as before the first step."""
        self._order.begin()
        self._keep([])

    @property
    def host_bytes(self) -> int:
        """What all of it takes, of a card's."""
        return sum(one.host_bytes for block in self._weights for one in self._contents(block))

    def _keep(self, visits: list[Visit]) -> None:
        """Optimizer state is there in backward alone. What a backward has updated leaves a block later, since it is on
        its way to the host."""
        blocks = [*dict.fromkeys(block for block, _ in visits)]
        back = {block for block, goes_back in visits if goes_back} if visits and visits[0][1] else set()
        late = {last[0]} if (last := self._order.last) is not None and last[1] and self._has_state else set()
        before, self._there = self._there, (*blocks, *late.difference(blocks))
        for block in dict.fromkeys((*before, *blocks)):
            for one in self._contents(block):
                if block not in late and (block not in blocks or (one.is_state and block not in back)):
                    one.leave()
        for block in blocks:
            contents = [one for one in self._contents(block) if block in back or not one.is_state]
            for one in reversed(contents) if back else contents:
                one.come()

    def _contents(self, block: int) -> list[HostContent]:
        weights = (ref() for ref in self._weights[block])
        return [one.content for one in weights if one is not None and isinstance(one.content, HostContent)]


class HostContent(Content):
    """While its weight is on the CPU, its numbers lie in plain memory."""

    store: HostStore

    def __init__(
        self, numbers: Tensor, store: HostStore, device: torch.device | None = None, block: int | None = None
    ) -> None:
        """
        Args:
            numbers: of a plain tensor, on the CPU or a card.
            store: of the model.
            device: where the weight is; None is where they are.
            block: whose it is.
        """
        self.block = block
        self._device = numbers.device if device is None else device
        self._begin()
        super().__init__(numbers, store)
        self.sign = self.sign.to(self._device)

    def _begin(self) -> None:
        self._held = self._lent = None
        self._rooms: list[Tensor] = []
        """(bytes,) of uint8 each, pinned, one after the other."""
        self._there: Tensor | None = None
        """On the card, or on their way."""
        self._flight: Flight = []
        self._came: Flight = []
        """The same of what was fetched last, also once it has been waited for."""
        self._back: Flight = []
        """Of what was updated, to the host."""
        self._arrival: Any = None
        """The event of the last such copy."""
        for flight in (self._flight, self._back):
            ending = weakref.finalize(self, Copies.wait, flight)
            ending.atexit = False

    @property
    def _is_on_card(self) -> bool:
        return self.store.is_planned or self._device.type == "cuda"

    @property
    def host_bytes(self) -> int:
        """What it takes of the host's memory, of a card's."""
        return sum(map(pinned_bytes, split(self._num_bytes))) if self._is_on_card else 0

    def _set(self, numbers: Tensor) -> None:
        self.leave()
        super()._set(numbers)
        self._num_bytes = self.size.numel() * self.dtype.itemsize
        if self._held is not None and self._device.type == "cuda" and not self.store.is_planned:
            parts = bytes_in(self._held).split(split(self._num_bytes))  # type: ignore[no-untyped-call]
            self._rooms = [pinned(len(part), part.dtype).copy_(part) for part in parts]
            self._held = None

    def to_file(self) -> None:
        """They are where they are to be."""

    def _on_host(self) -> Tensor:
        if self._held is not None:
            return self._held
        if self._arrival is not None:
            self._arrival.synchronize()
        return torch.cat(self._rooms).view(self.dtype).as_strided(self.size, self.stride)

    def stored(self) -> Tensor:
        """From where they lie."""
        if isinstance(self.sign, FakeTensor):
            return self.anew()
        return self._on_host().clone()

    def moved(self, device: torch.device) -> HostContent:
        """The same numbers, in plain memory for a CPU."""
        if device.type not in ("cpu", "cuda"):
            raise PlanError(
                f"settings.offload: a weight of {tuple(self.size)} is offloaded from a card, and was to be moved to "
                f"{device}. Use kind: none."
            )
        numbers = self._on_host()
        return HostContent(numbers.clone() if device.type == "cpu" else numbers, self.store, device)

    def anew(self) -> Tensor:
        """As every content's."""
        return self._read() if self._is_on_card else self._on_host().clone()

    def fetch(self) -> Tensor:
        """As every content's.

        Raises:
            PlanError: it is a model's weight, and not on a card.
        """
        if not self._is_on_card:
            if self.block is None:  # a copy, of whoever reads one on the CPU
                return self._on_host()
            raise PlanError(
                "settings.offload.to: host is where a card's weights lie until they are read, and the model is on the "
                "CPU. Use to: disk."
            )
        if self._lent is not None:
            return self._lent
        if self.block is not None:
            self.store.come_to(self.block)
        return self._arrived()

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """All of them, on the card, of which what is written goes to the host."""
        self.settle_copies()
        self.store.copies(self._device).read(self._back)
        self._lent = numbers = self._arrived()
        try:
            yield numbers
        finally:
            self._lent = None
            self._put_back(numbers)

    def _put_back(self, numbers: Tensor) -> None:
        if self.store.is_planned:
            if not isinstance(self.sign, FakeTensor):
                with torch._C._DisableTorchDispatch():
                    bytes_of(bytes_in(self._on_host()))[:] = bytes_of(bytes_in(numbers))
            return
        self.store.copies(self._device).into(self._rooms, bytes_in(numbers), self._back)
        self._arrival, self._back[1] = self._back[0], self._came[1]  # whose memory they leave
        if self._there is None:
            Copies.wait(self._back)

    def come(self) -> None:
        """Have them on their way to the card."""
        if self._is_on_card and self._there is None:
            self._there = self._known()

    def leave(self) -> None:
        """Nobody reads them for a while."""
        if self._there is not None:
            Copies.wait(self._flight)
            Copies.wait(self._back)
            self._there = None

    def _arrived(self) -> Tensor:
        """For the current stream."""
        found, copies = self._there if self._there is not None else self._known(), self.store.copies(self._device)
        copies.read(self._flight)
        copies.share(found, self._came)
        return found

    def _known(self) -> Tensor:
        found = self._fetched() if self._fetched is not None else None
        if found is None:
            found = self._copied(self._flight)
            self._came = [*self._flight]
            self._fetched = weakref.ref(found)
        return found

    def _copied(self, flight: Flight) -> Tensor:
        """All of them, on their way to the card."""
        rooms: list[Any] = self._rooms
        if self.store.is_planned:
            with torch._C._DisableTorchDispatch():
                rooms = [(0, None if isinstance(self.sign, FakeTensor) else bytes_of(bytes_in(self._on_host())))]
        made = self.store.copies(self._device).back(rooms, self._num_bytes, flight)
        return made.view(self.dtype).as_strided(self.size, self.stride)

    def _read(self, to_write: bool = False) -> Tensor:
        flight: Flight = []
        made = self._copied(flight)
        self.store.copies(self._device).read(flight)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> HostContent:
        made = object.__new__(type(self))
        memo[id(self)] = made
        sign = copy.deepcopy(self.sign, memo)
        vars(made).update(vars(self), store=copy.deepcopy(self.store, memo), copies=[], _fetched=None)
        made.sign = sign if isinstance(sign, FakeTensor) else torch.empty_like(self.sign)
        made._begin()
        if not isinstance(sign, FakeTensor):
            made._set(self.stored())
        return made

    def __reduce__(self) -> Any:
        return _rebuilt, (self.stored(), self.store, self.sign, self.block, self.is_state)


def _rebuilt(numbers: Tensor, store: HostStore, sign: Tensor, block: int | None, is_state: bool) -> HostContent:
    """It is where its sign is: ``map_location`` changes a tensor's device."""
    made = HostContent(numbers, store, sign.device, block)
    made.is_state = is_state
    return made


def most_host_bytes(model: nn.Module) -> int:
    """What weights of a model, and their optimizer's state, take of its card's host's memory."""
    return sum(one.host_bytes for one in _stores(model))


def leave(model: nn.Module) -> None:
    """Have no such weights on the card, as before the first step."""
    for one in _stores(model):
        one.leave()


def _stores(model: nn.Module) -> set[HostStore]:
    stores = {one.store for one in model.parameters() if isinstance(one, OffloadedWeight)}
    return {one for one in stores if isinstance(one, HostStore)}
