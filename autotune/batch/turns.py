"""Whose trial runs next: the searches of a batch or of a service share devices, and each free device goes to the one
trial, over all of them, that is expected to gain the most for each second.

Every search submits its requests as ever, from a thread or a process of its own; here they wait for their turn.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ..searches.event_base import Event
from ..searches.events import TrialEnded, TrialStarted
from ..searches.time_budget import NUM_REPEATS
from ..workers import STOPPED, Executor, Measured, Outcome, TrialRequest
from ..workers.pool import done

_PATIENCE_S = 2.0
"""Seconds for which a free device waits for searches that are choosing their next trial."""
_ROUNDS = 2
"""Trials of each other search of its priority that may run before one that waits."""
_UNKNOWN_GAIN = 1.0
"""Expected gain of finalists' runs, in logarithms, if the job as it stands does not fit."""
_LEAST_GAIN = 0.01
"""The least expected gain of finalists' runs: without them there is no plan."""

Start = Callable[[], Future[Outcome]]
"""Begins a run; the future is done when it has ended."""


@dataclass(eq=False)
class _Waiting:
    turn: Member
    start: Start
    future: Future[Outcome]
    promise: float | None
    passed: int = 0
    """Trials of its priority that ran before it."""


@dataclass
class Used:
    """What a device has done."""

    seconds: float = 0.0
    num_runs: int = 0


class GivesTurns(Protocol):
    """Where requests wait: here, or in another process."""

    lock: threading.RLock
    clock: Callable[[], float]
    """Seconds since some moment."""

    def num_slots(self) -> int:
        """Trials that one search may have under way: its share of the devices."""

    def submit(self, turn: Member, start: Start, promise: float | None) -> Future[Outcome]:
        """Have ``start`` called once it is a search's turn.

        Args:
            turn: the search's.
            start: begins the run.
            promise: its expected gain for each second; None where it is not known.
        """

    def advance(self) -> None:
        """Start trials on free devices. To be called now and then: a search that takes its time is not waited for
        without end."""


class Turns(GivesTurns):
    """Queue of requests, which chooses the one to run next."""

    def __init__(self, num_devices: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            num_devices: trials that may run at once.
            clock: seconds since some moment.
        """
        self._num_devices, self.clock = num_devices, clock
        self._turns: list[Member] = []
        self._waiting: list[_Waiting] = []
        self._num_running = 0
        self._free_since = clock()
        self.lock = threading.RLock()
        self.used: dict[str, Used] = {}
        """What each device has done, by its name."""
        self.span: tuple[float, float] | None = None
        """When the first run began and the last one ended."""
        self._is_over = False

    def join(self, turn: Member) -> None:
        """Add a search."""
        with self.lock:
            self._turns.append(turn)
            self._free_since = self.clock()

    def leave(self, turn: Member) -> None:
        """Remove a search that has ended, with what it still waits for."""
        with self.lock:
            self._turns.remove(turn)
            self._waiting = [one for one in self._waiting if one.turn is not turn]
        self.advance()

    def waits_for(self) -> dict[str, list[str]]:
        """By the name of each search that waits and has nothing running, the names of those whose trials run."""
        with self.lock:
            running = [turn.name for turn in self._turns if turn.num_running]
            return {turn.name: running for turn in self._turns if turn.num_waiting and not turn.num_running}

    def give_back(self) -> None:
        """From here on nothing more is started: what waits, and what is asked for later, gets ``STOPPED``."""
        with self.lock:
            self._is_over = True
            given, self._waiting = self._waiting, []
        for one in given:
            one.future.set_result(STOPPED)

    def advance(self) -> None:
        """Start trials on free devices."""
        with self.lock:
            while self._waiting and self._num_running < self._num_devices() and not self.is_awaited():
                chosen = self._choose()
                self._waiting.remove(chosen)
                for other in self._waiting:
                    other.passed += other.turn.priority == chosen.turn.priority
                self._start(chosen)

    def num_slots(self) -> int:
        """Trials that one search may have under way: its share of the devices."""
        with self.lock:
            return max(1, math.ceil(self._num_devices() / max(len(self._turns), 1)))

    def submit(self, turn: Member, start: Start, promise: float | None) -> Future[Outcome]:
        """Queue a request."""
        with self.lock:
            if self._is_over:
                return done(STOPPED)
            future: Future[Outcome] = Future()
            self._waiting.append(_Waiting(turn, start, future, promise))
            turn.changed(waiting=1)
        self.advance()
        return future

    def is_awaited(self) -> bool:
        """Whether an idle search may be about to submit a request."""
        if self.clock() - self._free_since >= _PATIENCE_S:
            return False
        return any(not (turn.num_waiting or turn.num_running or turn.num_parked) for turn in self._turns)

    def _choose(self) -> _Waiting:
        """The most gain for each second, times the priority; one that has waited for long goes before others of its
        priority. What is not known yet, such as of a search that begins, comes first."""
        best = max(self._waiting, key=lambda one: one.turn.priority * _or_first(one.promise))
        if best.promise is None:
            return max((one for one in self._waiting if one.promise is None), key=lambda one: one.turn.priority)
        alike = [one for one in self._waiting if one.turn.priority == best.turn.priority]
        most = _ROUNDS * sum(turn.priority == best.turn.priority for turn in self._turns)
        overdue = [one for one in alike if one.passed >= most]
        return max(overdue, key=lambda one: one.passed) if overdue else best

    def busy(self) -> dict[str, tuple[float, int]]:
        """By a device's name, the share of the time from the first run's begin to the last one's end in which it had
        something to run, and how many runs it had. Devices that had none are not there."""
        with self.lock:
            whole_s = self.span[1] - self.span[0] if self.span else 0.0
            rows = ((name, used) for name, used in sorted(self.used.items()) if name)
            return {name: (used.seconds / whole_s if whole_s else 0.0, used.num_runs) for name, used in rows}

    def _count(self, began: float, ran: Future[Outcome]) -> None:
        now = self.clock()
        self.span = (min(self.span[0], began) if self.span else began, now)
        used = self.used.setdefault("" if ran.exception() else ran.result().where, Used())
        used.seconds += now - began
        used.num_runs += 1

    def _start(self, chosen: _Waiting) -> None:
        self._num_running += 1
        chosen.turn.changed(waiting=-1, running=1)
        began = self.clock()
        chosen.start().add_done_callback(partial(self._ended, chosen, began))

    def _ended(self, chosen: _Waiting, began: float, ran: Future[Outcome]) -> None:
        with self.lock:
            self._num_running -= 1
            self._free_since = self.clock()
            chosen.turn.changed(running=-1)
            chosen.turn.device_s += self._free_since - began
            chosen.turn.num_runs += 1
            self._count(began, ran)
        error = ran.exception()
        if error is not None:
            chosen.future.set_exception(error)
        else:
            chosen.future.set_result(ran.result())
        self.advance()


@dataclass(eq=False)
class Member:
    """A search that takes turns: what it has waiting and running, and what it has used."""

    turns: GivesTurns
    name: str
    priority: float
    device_s: float = 0.0
    """Device time that it has used, seconds."""
    num_runs: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_parked: int = 0
    _waited_s: float = field(default=0.0, init=False)
    _since: float | None = field(default=None, init=False)

    def clock(self) -> float:
        """Seconds since some moment, without those in which it waited for a device: what ``max_time`` counts."""
        now = self.turns.clock()
        return now - self._waited_s - (now - self._since if self._since is not None else 0.0)

    def park(self) -> None:
        """Mark it as waiting for another search: no request is expected of it, and its clock stops."""
        with self.turns.lock:
            self.num_parked += 1
            self.changed()
        self.turns.advance()

    def unpark(self) -> None:
        """Undo :meth:`park`."""
        with self.turns.lock:
            self.num_parked -= 1
            self.changed()

    def changed(self, waiting: int = 0, running: int = 0) -> None:
        """Requests began or ended to wait or to run."""
        self.num_waiting += waiting
        self.num_running += running
        waits, now = self.num_running == 0 and self.num_waiting + self.num_parked > 0, self.turns.clock()
        if waits and self._since is None:
            self._since = now
        elif not waits and self._since is not None:
            self._waited_s, self._since = self._waited_s + now - self._since, None


class Turn(Member, Executor):
    """Executor of one search: its requests wait for their turn."""

    def __init__(self, turns: GivesTurns, executor: Executor, name: str = "", priority: float = 1.0) -> None:
        """
        Args:
            turns: where requests wait.
            executor: runs them; stays the caller's to close.
            name: of the search.
            priority: factor on its trials' expected gain.
        """
        super().__init__(turns, name, priority)
        self.executor = executor
        self.promise: float | None = None
        """Expected gain for each second of the trial that is submitted next; None where it is not known."""
        self._reference: float | None = None
        self._best: float | None = None
        self._trial_s = 1.0

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        """Its share of the devices."""
        return self.turns.num_slots()

    @property
    def device_type(self) -> str:  # type: ignore[override]
        """The executor's."""
        return self.executor.device_type

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request."""
        promise, self.promise = self.promise, None
        return self.turns.submit(self, partial(self.executor.submit, request), promise)

    def close(self) -> None:
        """The executor is not its own."""

    def observe(self, event: Event) -> None:
        """Note what the next run may gain, by which the next trial is chosen."""
        match event:
            case TrialEnded(outcome=Measured(measurement=measurement, seconds=seconds)):
                self._trial_s = seconds or self._trial_s
                if event.number == 0:
                    self._reference = measurement.samples_per_s.value if event.feasible else None
                if event.is_best:
                    self._best = measurement.samples_per_s.value
            case TrialStarted(finalist_round=None):
                self.promise = event.promise
            case TrialStarted():
                known = self._reference and self._best
                gain = math.log(self._best / self._reference) if known else _UNKNOWN_GAIN  # type: ignore[operator]
                self.promise = max(gain, _LEAST_GAIN) / (2 * NUM_REPEATS * self._trial_s)


def _or_first(promise: float | None) -> float:
    return math.inf if promise is None else promise
