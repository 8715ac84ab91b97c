"""Executors that have slots: a thread each, first come first served, and another try where a trial was lost."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from ._base import Executor
from .outcome import STOPPED, Lost, Outcome
from .request import TrialRequest

_PAUSES_S = (0.0, 3.0)
"""Before each further try: a server that was killed is started again at once, a full disk may be cleared soon. A loss
whose device has gone with it is none of these tries."""
_PATIENCE_S = 15.0
"""How long no device may come before it is said that all are waited for: to start a process there takes seconds."""
_MOST_THREADS = 4096
"""Trials that wait or run; a thread is started only where none is idle."""


def done(outcome: Outcome) -> Future[Outcome]:
    """A future that has its outcome already."""
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


class Slot(Protocol):
    """Runs one trial at a time on a device of its own."""

    name: str
    """Of the device, unlike any other's of the executor."""

    def run(self, request: TrialRequest) -> Outcome:
        """Run a trial: ``Lost`` where what runs trials has failed. The next call starts anew."""

    def close(self) -> None:
        """End everything this slot started, now; a trial that runs meanwhile is lost."""


class SharedSlot(Slot, Protocol):
    """A slot whose device others may be using."""

    def wait_until_up(self) -> None:
        """Until its device is its own, however long that takes, or it never will be, which its next trial tells."""


class SlotPool(Executor):
    """An executor over some slots, which may come and go."""

    def __init__(
        self,
        slots: Sequence[Slot],
        is_there: Callable[[Slot], bool] = lambda slot: True,
        is_used: Callable[[Slot], bool] = lambda slot: False,
    ) -> None:
        """
        Args:
            slots: those that there are now.
            is_there: whether the device of a slot whose trial was lost has not gone for good.
            is_used: whether another search's trial has the device of a free slot: one is taken that is idle, if any is.
        """
        self._slots, self._is_there, self._is_used = list(slots), is_there, is_used
        self._leaving: list[Slot] = []
        self._free = list(slots)
        """The last is taken first: a slot that has run is warm."""
        self._numbers = itertools.count()
        self._waiting: set[int] = set()
        """Numbers of the requests that have no slot; the least is the next."""
        self._changed = threading.Condition()
        """Held wherever slots come, go, are taken or given back."""
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="autotune-slot")
        self._closing = threading.Event()

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        """Those that are left."""
        return len(self._slots)

    def add(self, slot: Slot) -> None:
        """A device has come."""
        with self._changed:
            self._slots.append(slot)
            self._release(slot)

    def retire(self, has_gone: Callable[[Slot], bool]) -> None:
        """Devices have gone, or are about to: nothing is started there any more. What runs there may end; what is lost
        is run elsewhere."""
        with self._changed:
            gone = [slot for slot in self._slots if has_gone(slot)]
            idle = [slot for slot in gone if slot in self._free]
            self._slots = [slot for slot in self._slots if slot not in gone]
            self._free = [slot for slot in self._free if slot not in gone]
            self._leaving += gone
            for slot in idle:
                self._release(slot)
            self._changed.notify_all()

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request."""
        with self._changed:
            number = next(self._numbers)
            try:
                future = self._threads.submit(self._run, request, number)
            except RuntimeError:  # closed, by another thread maybe
                return done(STOPPED)
            self._waiting.add(number)
        return future

    def close(self) -> None:
        """End every process of every slot. Futures still open get ``Crashed``."""
        self._closing.set()
        for slot in [*self._slots, *self._leaving]:
            slot.close()
        self._threads.shutdown()

    def _run(self, request: TrialRequest, number: int) -> Outcome:
        """An outcome is never asked for again; a loss says nothing of the trial, so that is, twice, and once more where
        the device has gone. Each try has all of its deadline: with what another has left of it, a trial would seem to
        hang."""
        losses: list[str] = []
        pauses_s = [0.0, *_PAUSES_S]
        slot = self._take(number)
        try:
            while slot is not None and pauses_s:
                if self._closing.wait(pauses_s[0]):
                    return STOPPED
                outcome = slot.run(request)
                if not isinstance(outcome, Lost):
                    return outcome.model_copy(update={"where": slot.name})
                losses.append(outcome.message)
                if self._closing.is_set():
                    return STOPPED
                if self._has_gone(slot):
                    self._release(slot)
                    slot = self._take(number)
                else:
                    del pauses_s[0]
                    slot = self._another(slot)
        finally:
            if slot is not None:
                self._release(slot)
        if slot is None:
            losses.append("no device is left")
        return Lost(message="; ".join(dict.fromkeys(losses)))

    def _take(self, number: int) -> Slot | None:
        """A free slot, once there is one and all that were asked before have theirs; None where none is left."""
        with self._changed:
            self._waiting.add(number)  # again, of one whose device has gone
            self._changed.wait_for(lambda: not self._slots or (self._free and number == min(self._waiting)))
            self._waiting.remove(number)
            self._changed.notify_all()
            if not self._slots:
                return None
            idle = next((slot for slot in reversed(self._free[1:]) if not self._is_used(slot)), self._free[0])
            self._free.remove(idle)
            return idle

    def _has_gone(self, slot: Slot) -> bool:
        if not self._is_there(slot):
            self.retire(lambda other: other is slot)
        return slot not in self._slots

    def _another(self, slot: Slot) -> Slot:
        """A free slot in exchange for one that was lost; the same where no other is free."""
        with self._changed:
            if not self._free:
                return slot
            other = self._free.pop()
            self._release(slot)
            return other

    def _release(self, slot: Slot) -> None:
        """A slot has nothing to run: the next trial may have it, unless its device goes."""
        with self._changed:
            if slot in self._slots:
                self._free.append(slot)
                self._changed.notify_all()
                return
            with contextlib.suppress(RuntimeError):  # closed, with all slots
                self._threads.submit(self._end, slot)

    def _end(self, slot: Slot) -> None:
        slot.close()
        with contextlib.suppress(ValueError):  # another thread has
            self._leaving.remove(slot)


class Joining:
    """Slots that a pool gets once their devices are free. Else a trial would wait for a device that others use while
    another stands idle."""

    def __init__(self, pool: SlotPool, is_there: Callable[[Slot], bool]) -> None:
        """
        Args:
            pool: that gets them.
            is_there: whether the device of one that is up has not gone meanwhile.
        """
        self._pool, self._is_there = pool, is_there
        self._has_one = threading.Event()
        self.tell: Callable[[], None] = lambda: None
        """Is called when one has joined."""

    def begin(self, slots: Iterable[SharedSlot]) -> None:
        """Wait for their devices, each in a thread of its own."""
        for slot in slots:
            threading.Thread(target=self._join, args=(slot,), daemon=True).start()

    def wait_for_one(self, tell: Callable[[], None]) -> None:
        """Until one has joined; ``tell`` is called, once, where that takes long."""
        if not self._has_one.wait(_PATIENCE_S):
            tell()
            self._has_one.wait()

    def _join(self, slot: SharedSlot) -> None:
        slot.wait_until_up()
        if self._is_there(slot):
            self._pool.add(slot)
            self._has_one.set()
            self.tell()
