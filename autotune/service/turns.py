"""The turns of the searches that a server works on: their drivers ask it, and each free device goes to the one trial
that is expected to gain the most for each second, as in a batch."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from pydantic import ValidationError

from ..batch.turns import Member, Turns
from ..batch.turns_of_server import MOST_BYTES, Said, Told
from ..workers import STOPPED, Outcome

_MOST_ASKED = 1000
"""Requests of one driver that wait or run: no search has as many."""
_MOST_DEVICES = 10_000


class SearchTurns:
    """One queue for each type of device."""

    def __init__(self, is_cluster: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            is_cluster: the devices are a cluster's, which gives each to one search at a time: what a search does not
                use, it is to give back. Else they are this machine's.
            clock: seconds since some moment.
        """
        self.is_cluster, self._clock = is_cluster, clock
        self._lock = threading.RLock()
        self._queues: dict[str, Turns] = {}
        self._drivers: list[DriverTurns] = []

    def advance(self) -> None:
        """Start trials on free devices. To be called now and then."""
        with self._lock:
            queues = [*self._queues.values()]
        for queue in queues:
            queue.advance()
        self.tell_all()

    def waits_for(self) -> dict[str, list[str]]:
        """By the id of each search that waits for a device, the ids of those that have one."""
        with self._lock:
            queues = [*self._queues.values()]
        return {name: others for queue in queues for name, others in queue.waits_for().items()}

    def queue(self, device: str) -> Turns:
        """Of a type of device."""
        with self._lock:
            if device not in self._queues:
                self._queues[device] = Turns(partial(self._num_devices, device), self._clock)
            return self._queues[device]

    def _num_devices(self, device: str) -> int:
        """As many as the driver that has the most can use."""
        return max((one.num_slots for one in [*self._drivers] if one.device == device), default=1)

    def joined(self, driver: DriverTurns) -> None:
        """A driver is heard of."""
        with self._lock:
            self._drivers.append(driver)
        self.tell_all()

    def left(self, driver: DriverTurns) -> None:
        """It has gone."""
        with self._lock:
            self._drivers.remove(driver)
        self.tell_all()

    def tell_all(self) -> None:
        """Of what has changed for them."""
        for driver in [*self._drivers]:
            driver.tell()

    def rivals(self, driver: DriverTurns) -> list[DriverTurns]:
        """Those that cannot have a device of a cluster's while this one has it: of its queue, and of another kind of
        device, whose trials need processors of the same nodes."""
        others = [each for each in [*self._drivers] if each is not driver and self.is_cluster]
        return [each for each in others if each.device == driver.device or each.kind != driver.kind]


class DriverTurns:
    """The server's end of one driver's socket. A driver runs a task's code: whatever it says of its devices, a CPU has
    one trial at a time, and trials of two searches on one card wait for each other."""

    def __init__(self, turns: SearchTurns, search_id: str, priority: float) -> None:
        """
        Args:
            turns: of all searches.
            search_id: of this one.
            priority: factor on its trials' expected gain.
        """
        self._turns, self._search_id, self._priority = turns, search_id, priority
        self._connection, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.device, self.kind, self.num_slots = "", "", 1
        self._queue: Turns | None = None
        self._member: Member | None = None
        self._running: dict[int, Future[Outcome]] = {}
        self._told = Told(num_slots=0)
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"turns-{search_id}", daemon=True)

    def begin(self) -> None:
        """The driver has its end, and is listened to."""
        self.theirs.close()
        self._thread.start()

    def close(self) -> None:
        """Nothing of the driver runs any more: others have its turns."""
        self.theirs.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._connection.close()
        if self._queue is None or self._member is None:
            return
        self._queue.leave(self._member)
        for number in [*self._running]:
            self._ended(number)
        self._turns.left(self)

    def tell(self, begin: int | None = None, others_wait: bool = False) -> None:
        """Say what its share is, which of its requests begins, and whether others wait, where that is new. One that
        does not listen is not waited for.

        Args:
            begin: number of the request.
            others_wait: one asks just now, whose turn it may be at once.
        """
        share = 1 if self._queue is None else self._queue.num_slots()
        with self._telling:
            others_wait = others_wait or any(each.needs_what(self) for each in self._turns.rivals(self))
            told = Told(num_slots=share, begin=begin, others_wait=others_wait)
            if told == self._told:
                return
            self._told = told.model_copy(update={"begin": None})
            data = told.model_dump_json(exclude_none=True).encode()
            try:
                self._connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                self._hang_up()

    def needs_what(self, other: DriverTurns) -> bool:
        """Whether it has something that can run only where another search leaves a device: what waits, or has begun in
        another queue, which does not know what the other's devices have left."""
        member = self._member
        return member is not None and (member.num_waiting > 0 or (self.kind != other.kind and member.num_running > 0))

    def _hang_up(self) -> None:
        """The driver sees that, and ends."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValidationError):
            while data := self._connection.recv(MOST_BYTES):
                self._take(Said.model_validate_json(data))
        self._hang_up()

    def _take(self, said: Said) -> None:
        is_one = said.device.startswith("cpu") and not self._turns.is_cluster
        self.num_slots = 1 if is_one else max(1, min(said.num_slots, _MOST_DEVICES))
        if self._queue is None or self._member is None:
            self.device, self.kind = said.device, said.device.partition(" ")[0]
            self._queue = self._turns.queue(said.device)
            self._member = Member(self._queue, self._search_id, self._priority)
            self._queue.join(self._member)
            self._turns.joined(self)
        if said.ended is not None:
            self._ended(said.ended)
        if said.asks is not None:
            if self._member.num_waiting + self._member.num_running >= _MOST_ASKED:
                self._hang_up()
                return
            for rival in self._turns.rivals(self):
                rival.tell(others_wait=True)
            self._queue.submit(self._member, partial(self._start, said.asks), said.promise)
        self._turns.tell_all()

    def _start(self, number: int) -> Future[Outcome]:
        """Of a run whose outcome is the driver's: it is done once that says so."""
        with self._lock:
            future = self._running.setdefault(number, Future())
        self.tell(begin=number)
        return future

    def _ended(self, number: int) -> None:
        with self._lock:
            future = self._running.pop(number, None)
        if future is not None:
            future.set_result(STOPPED)
