"""What blocks of a card's job save, in the host's pinned memory. It leaves while the next block computes, and comes
back two blocks before backward needs it.

Source: Rhu et al. 2016, arXiv:1602.08124; CUDA's streams: https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....errors import PlanError
from ....internals.fake_tensors import is_planned_for_card
from ..forwards import has_forward
from .copies import AHEAD, Copies, Flight, Planned
from .saved_elsewhere import Place, Saved, bytes_in, check_version, offloaded

if TYPE_CHECKING:
    from torch import Tensor, nn


class Host(Place):
    """Pinned memory. In forward, what a block saved is on the card until the next one but one begins: the computing
    stream waits for its copies then, and has its memory. In backward, what the two blocks before saved is fetched. So
    what is on the card at a time does not depend on how far the host is ahead of it.
    """

    def __init__(self, is_planned: bool | None = None) -> None:
        """
        Args:
            is_planned: for a card that is not here: its memory alone is looked at. None is as plans are applied now.
        """
        super().__init__()
        self._is_planned = is_planned_for_card() if is_planned is None else is_planned
        self._copies: Copies | None = None
        """None before the first."""
        self._calls: list[weakref.ref[_Call]] = []
        """That backward is to come to, in the order of forward."""
        self._there: list[_Call] = []
        """What these saved is on the card, or on its way."""
        self._at: weakref.ref[_Call] | None = None
        """Where backward is."""

    def __reduce__(self) -> Any:
        return type(self), (self._is_planned,)

    def saving(self, block: nn.Module) -> Callable[[Tensor], Any]:
        """As every place's.

        Raises:
            PlanError: the block is not on a card.
        """
        own = next(block.parameters(), None)
        if own is not None and own.device.type == "cpu" and not self._is_planned:
            raise PlanError(
                "settings.offload.to: host is where a card's activations go, and the model is on the CPU. Use to: disk."
            )
        return super().saving(block)

    def _begin(self) -> Callable[[], None]:
        call = _Call()
        self._calls = [*(one for one in self._calls if one() is not None), weakref.ref(call)]
        self._at = None
        self._keep([*self._there[-1:], call])
        return functools.partial(self._come_to, call)

    def _come_to(self, call: _Call) -> None:
        """Backward is at what this one saved: fetch what comes next."""
        if self._at is not None and self._at() is call:
            return
        self._at = weakref.ref(call)
        calls = [one for one in (ref() for ref in self._calls) if one is not None]
        number = calls.index(call)
        self._keep(calls[max(number - AHEAD, 0) : number + 1])

    def _keep(self, calls: list[_Call]) -> None:
        before, self._there = self._there, calls
        for call in before:
            if call not in calls:
                call.leave()
        for call in reversed(calls):
            if call not in before:
                call.come()

    def _takes(self, tensor: Tensor) -> bool:
        if self._is_planned:
            return True
        return tensor.device.type == "cuda" and (self._copies is None or self._copies.device == tensor.device)

    def _take(self, tensor: Tensor) -> Saved:
        if self._copies is None:
            self._copies = (Planned if self._is_planned else Copies)(tensor.device)
        return _OnHost(self._copies, self._there[-1], tensor)

    def _saved(self, tensor: Tensor) -> Saved:
        found = super()._saved(tensor)
        assert isinstance(found, _OnHost), "_take makes no other"
        if found.call not in self._there:
            found.stay(tensor)
        return found


def most_host_bytes(model: nn.Module) -> int:
    """What a model's blocks have had of the host's memory at a time."""
    forwards = (vars(module)["forward"] for module in model.modules() if has_forward(module, offloaded))
    places = {id(place): place for place in (forward.args[1] for forward in forwards)}
    hosts = (one for one in places.values() if isinstance(one, Host))
    return sum(one._copies.most_bytes for one in hosts if one._copies is not None)


class _Call:
    """What one forward of a block saved."""

    def __init__(self) -> None:
        self.saved: list[weakref.ref[_OnHost]] = []

    def leave(self) -> None:
        """It is no longer on the card."""
        for one in (ref() for ref in self.saved):
            if one is not None:
                one.leave()

    def come(self) -> None:
        """Fetch it, what was saved last first."""
        for one in (ref() for ref in reversed(self.saved)):
            if one is not None:
                one.come()


class _OnHost(Saved):
    def __init__(self, copies: Copies, call: _Call, tensor: Tensor) -> None:
        super().__init__()
        self.call, self._copies = call, copies
        self._held: Tensor | None = bytes_in(tensor)
        self._num_bytes = tensor.untyped_storage().nbytes()
        self._watched: Tensor | None = tensor.detach()
        """It tells of changes as long as the card may be read."""
        self._version = self._last = tensor._version
        self._stays = False
        self._flight: Flight = []
        self._room = copies.out(self._held, self._flight)
        ending = weakref.finalize(self, copies.end, self._room, self._flight)
        ending.atexit = False
        call.saved.append(weakref.ref(self))

    def stay(self, tensor: Tensor) -> None:
        """It is left on the card, where it still is."""
        self._stays = True
        if self._held is None:
            self._held, self._watched = bytes_in(tensor), tensor.detach()

    def leave(self) -> None:
        """From the card: it is on the host by the time that its memory is used again."""
        if self._held is None or self._stays:
            return
        self._copies.wait(self._flight)
        self._look()
        self._held = self._watched = None

    def come(self) -> None:
        """Back to the card, unless it is there."""
        if self._held is None:
            self._held = self._copies.back([self._room], self._num_bytes, self._flight)

    def restored(self) -> Tensor:
        """(bytes,) of uint8, on the card.

        Raises:
            RuntimeError: it was changed before it left, as torch says it.
        """
        self.come()
        assert self._held is not None, "it has come"
        self._copies.read(self._flight)
        self._look()
        check_version(self._held, self._last, self._version)
        return self._held

    def _look(self) -> None:
        if self._watched is not None:
            self._last = self._watched._version
