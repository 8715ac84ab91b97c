"""Copies between a card and the host's pinned memory, beside what the card computes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..pinned import pinned, pinned_bytes
from .saved_elsewhere import is_fake
from .unnamed_file import bytes_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AHEAD = 2
"""Blocks whose bytes are fetched before they are read."""
Flight = list[Any]
"""The event of a copy, and the stream that computed when it began and has not waited for it; else nothing."""


class Copies:
    """On a stream of their own, which does them in order. Each begins once what is queued to be computed by then is
    done, so that its numbers are there, and memory that was used before is free."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: the card.
        """
        self.device = device
        self._stream: Any = None
        self._free: list[Tensor] = []
        """Pinned memory, the smallest first."""
        self._had_bytes = 0
        self.most_bytes = 0
        """That was had of the host at a time."""

    def out(self, numbers: Tensor, flight: Flight) -> Any:
        """Pinned memory that has these numbers, (bytes,) of uint8, once the copy has arrived."""
        room = self._room(pinned_bytes(numbers.numel()), numbers.dtype)
        self._copy([(room[: numbers.numel()], numbers)], flight)
        return room

    def _room(self, size: int, dtype: torch.dtype) -> Tensor:
        """The smallest free one that is large enough; else a new one, for which as much of the others is given back:
        torch would keep each power of two by itself."""
        import torch

        at = bisect_left(self._free, size, key=len)
        if at < len(self._free):
            return self._free.pop(at)
        given = 0
        while self._free and given < size:
            given += len(self._free.pop())
        if given and hasattr(torch.accelerator, "empty_host_cache"):  # an older torch keeps it
            torch.accelerator.empty_host_cache()
        self._had_bytes += size - given
        self.most_bytes = max(self.most_bytes, self._had_bytes)
        return pinned(size, dtype)

    def back(self, rooms: Sequence[Any], num_bytes: int, flight: Flight) -> Tensor:
        """(num_bytes,) of uint8 on the card, once the copy has arrived, from where they lie one after the other."""
        import torch

        made = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        parts = made.split([*map(len, rooms[:-1]), num_bytes - sum(map(len, rooms[:-1]))])  # type: ignore[no-untyped-call]
        self._copy([(part, room[: len(part)]) for part, room in zip(parts, rooms, strict=True)], flight)
        return made

    def into(self, rooms: Sequence[Tensor], numbers: Tensor, flight: Flight) -> None:
        """Such rooms have these numbers, (bytes,) of uint8, once the copy has arrived."""
        parts = numbers.split([*map(len, rooms)])  # type: ignore[no-untyped-call]
        self._copy([*zip(rooms, parts, strict=True)], flight)

    @staticmethod
    def wait(flight: Flight) -> None:
        """What is computed from here on, on the stream whose memory it is, begins once a copy has arrived; the host
        goes on. Another stream may be the current one: Python collects garbage anywhere."""
        if flight:
            event, computing = flight
            computing.wait_event(event)
            flight.clear()

    def read(self, flight: Flight) -> None:
        """The same, also on the current stream."""
        import torch

        if flight:
            torch.cuda.current_stream(self.device).wait_event(flight[0])
            self.wait(flight)

    def share(self, numbers: Tensor, came: Flight) -> None:
        """The same, on a current stream that is not the one whose memory it is, however often others have waited: nor
        is the memory used again before it has read them.

        Args:
            numbers: that a copy brings or has brought.
            came: the flight of that, as it began.
        """
        import torch

        if came and (current := torch.cuda.current_stream(self.device)) != came[1]:
            current.wait_event(came[0])
            numbers.record_stream(current)

    def end(self, room: Any, flight: Flight) -> None:
        """Nobody asks for it again: neither the card's memory nor the host's is used before a copy has."""
        self.wait(flight)
        insort(self._free, room, key=len)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], flight: Flight) -> None:
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            for to, numbers in pairs:
                to.copy_(numbers, non_blocking=True)
        flight[:] = [self._stream.record_event(), computing]


class Planned(Copies):
    """For a card that is not here: the memory that they take on it, and of the host."""

    def __init__(self, device: torch.device) -> None:
        """As every card's."""
        super().__init__(device)
        self._live_bytes = 0

    def out(self, numbers: Tensor, flight: Flight) -> Any:
        """What is not seen among tensors."""
        size = pinned_bytes(numbers.untyped_storage().nbytes())
        if not self._live_bytes:  # of each step by itself, whose batch may be another
            self.most_bytes = 0
        self._live_bytes += size
        self.most_bytes = max(self.most_bytes, self._live_bytes)
        return size, None if is_fake(numbers) else bytes(bytes_of(numbers))

    def back(self, rooms: Sequence[Any], num_bytes: int, flight: Flight) -> Tensor:
        """As on the card."""
        import torch

        made = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        for _, content in rooms:
            if content is not None:
                bytes_of(made)[:] = content
        return made

    def end(self, room: Any, flight: Flight) -> None:
        """As on the card."""
        self._live_bytes -= room[0]
