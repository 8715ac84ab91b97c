"""The turns of a service's searches, as one search's driver has them: it asks its server over a socket, and runs a
trial once the server says so."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

from pydantic import BaseModel, ConfigDict, FiniteFloat

from ..searches.event_base import Event
from ..searches.time_budget import TimeBudget
from ..workers import STOPPED, Executor, Lost, Outcome
from ..workers.pool import done
from .turns import GivesTurns, Member, Start, Turn

SOCKET = "AUTOTUNE_SERVICE_TURNS"
"""Environment variable of a service's driver: the number of its socket to the server. Its trials have neither."""
MOST_BYTES = 4096
"""Of a message, which is one packet."""
_LOOK_S = 0.1
_GONE = Lost(message="the service that this search belongs to has gone")


class Said(BaseModel):
    """What a driver says, each time with what it has: that a request waits, that a run has ended, or nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    """Type of its devices."""
    num_slots: int
    """How many of them it can use at once."""
    asks: int | None = None
    """Number of the request."""
    promise: FiniteFloat | None = None
    """What that is expected to gain for each second; None where it is not known."""
    ended: int | None = None


class Told(BaseModel):
    """What a server says."""

    model_config = ConfigDict(frozen=True)

    num_slots: int
    """The search's share of the devices."""
    begin: int | None = None
    """Number of the request whose turn it is."""
    others_wait: bool = False
    """Other searches wait for what this one has: where that is a cluster's, they get what stands idle."""


class TurnsOfServer(GivesTurns):
    """Requests wait at the server."""

    def __init__(
        self,
        connection: socket.socket,
        executor: Executor,
        device: str,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            connection: to the server, which it closes.
            executor: that runs what is submitted.
            device: ``cpu`` or ``cuda``.
            stop: once set, nothing more is started.
            clock: seconds since some moment.
        """
        self.lock, self.clock = threading.RLock(), clock
        self._connection, self._executor, self._device, self._stop = connection, executor, device, stop
        self._share, self._others_wait, self._said_slots = 1, False, 0
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Member, Start, Future[Outcome]]] = {}
        self._end: Outcome | None = None
        """What comes of requests that wait, and of later ones, once nothing is started any more."""
        self._say()
        self._thread = threading.Thread(target=self._listen, name="autotune-turns", daemon=True)
        self._thread.start()

    def num_slots(self) -> int:
        """The search's share of the devices."""
        return max(1, min(self._share, self._executor.num_slots))

    def submit(self, turn: Member, start: Start, promise: float | None) -> Future[Outcome]:
        """Ask for a turn."""
        with self.lock:
            if self._end is not None:
                return done(self._end)
            number, future = next(self._numbers), Future[Outcome]()
            self._asked[number] = turn, start, future
            turn.changed(waiting=1)
        self._say(asks=number, promise=promise)
        return future

    def advance(self) -> None:
        """The server does."""

    def close(self) -> None:
        """Ask for nothing more."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _say(self, asks: int | None = None, promise: float | None = None, ended: int | None = None) -> None:
        self._said_slots = self._executor.num_slots
        said = Said(device=self._device, num_slots=self._said_slots, asks=asks, promise=promise, ended=ended)
        with contextlib.suppress(OSError):  # it has gone, which ends what waits
            self._connection.send(said.model_dump_json(exclude_none=True).encode())

    def _listen(self) -> None:
        while True:
            if self._stop.is_set():
                self._give_back(STOPPED)
            if not select.select([self._connection], [], [], _LOOK_S)[0]:
                if self._executor.num_slots != self._said_slots:
                    self._say()
                continue
            try:
                data = self._connection.recv(MOST_BYTES)
            except OSError:
                data = b""
            if not data:
                return self._give_back(_GONE)
            told = Told.model_validate_json(data)
            self._share = told.num_slots
            if told.others_wait != self._others_wait:
                self._others_wait = told.others_wait
                self._executor.share(told.others_wait)
            if told.begin is not None:
                self._begin(told.begin)

    def _begin(self, number: int) -> None:
        with self.lock:
            if (asked := self._asked.pop(number, None)) is not None:
                asked[0].changed(waiting=-1, running=1)
        if asked is None:  # given back meanwhile
            self._say(ended=number)
            return
        turn, start, future = asked
        start().add_done_callback(partial(self._ended, number, turn, future))

    def _ended(self, number: int, turn: Member, future: Future[Outcome], ran: Future[Outcome]) -> None:
        with self.lock:
            turn.changed(running=-1)
        self._say(ended=number)
        if (error := ran.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(ran.result())

    def _give_back(self, outcome: Outcome) -> None:
        with self.lock:
            self._end = self._end or outcome
            given, self._asked = [*self._asked.values()], {}
            for turn, _, _ in given:
                turn.changed(waiting=-1)
        for _, _, future in given:
            future.set_result(outcome)


def server_connection() -> socket.socket | None:
    """Of a service's driver, whose trials get none: to be asked for before anything is started. None of any other
    search."""
    if (number := os.environ.pop(SOCKET, None)) is None:
        return None
    connection = socket.socket(fileno=int(number))
    connection.set_inheritable(False)
    return connection


@contextlib.contextmanager
def taking_turns(
    connection: socket.socket | None,
    executor: Executor,
    device: str,
    stop: threading.Event,
    time_budget: TimeBudget,
) -> Iterator[tuple[Executor, Callable[[Event], None]]]:
    """Take turns with the service's other searches, trial by trial.

    Args:
        connection: to the service; without it the search has its executor as it is.
        executor: the search's own.
        device: ``cpu`` or ``cuda``.
        stop: once set, nothing more is started.
        time_budget: does not count what is waited for others.

    Yields:
        What to submit to, and what is to be told of the search's events.
    """
    if connection is None:
        yield executor, lambda event: None
        return
    turns = TurnsOfServer(connection, executor, f"{device} {executor.device_type}".strip(), stop)
    turn = Turn(turns, executor)
    time_budget.clock = turn.clock
    try:
        yield turn, turn.observe
    finally:
        turns.close()
