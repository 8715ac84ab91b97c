"""Executors that have slots: a thread each, first come first served, and another try where a trial was lost."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from ._base import Executor
from .outcome import STOPPED, Lost, Outcome
from .request import TrialRequest

_PAUSES_S = (0.0, 3.0)
"""Before each further try: a server that was killed is started again at once, a full disk may be cleared soon. A loss
whose device has gone with it is none of these tries."""
_LOOK_S = 1.0
"""How long a device is waited for before it is looked for another."""
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

    def gets_device(self, within_s: float) -> bool:
        """Whether its device is its own within so long, or it is closed."""

    @property
    def has_device(self) -> bool:
        """Whether its device is its own now."""

    def leave_device(self) -> None:
        """Give its device back, also where it is still waited for."""


AnySlot = TypeVar("AnySlot", bound=Slot)


class SlotPool(Executor, Generic[AnySlot]):
    """An executor over some slots, which may come and go."""

    def __init__(
        self,
        slots: Sequence[AnySlot],
        is_there: Callable[[AnySlot], bool] = lambda slot: True,
        is_used: Callable[[AnySlot], bool] = lambda slot: False,
    ) -> None:
        """
        Args:
            slots: those that there are now.
            is_there: whether the device of a slot whose trial was lost has not gone for good.
            is_used: whether another search's trial has the device of a free slot: one is taken that is idle, if any is.
        """
        self._slots, self._is_there, self._is_used = list(slots), is_there, is_used
        self._leaving: list[AnySlot] = []
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

    def add(self, slot: AnySlot) -> None:
        """A device has come."""
        with self._changed:
            self._slots.append(slot)
            self._release(slot)

    def retire(self, has_gone: Callable[[AnySlot], bool]) -> None:
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
                if (slot := self._ready(slot, number)) is None:
                    break
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

    def _take(self, number: int) -> AnySlot | None:
        """A free slot, once there is one and all that were asked before have theirs; None where none is left."""
        with self._changed:
            self._waiting.add(number)  # again, of one whose device has gone
            self._changed.wait_for(lambda: not self._slots or (self._free and number == min(self._waiting)))
            self._waiting.remove(number)
            self._changed.notify_all()
            if not self._slots:
                return None
            chosen = self._choose()
            self._free.remove(chosen)
            return chosen

    def _choose(self) -> AnySlot:
        """Of the free slots."""
        return next((slot for slot in reversed(self._free[1:]) if not self._is_used(slot)), self._free[0])

    def _ready(self, slot: AnySlot, number: int) -> AnySlot | None:
        """The slot that is to run a request: the one that it has, or another in its place; None where none is left."""
        return slot

    def _has_gone(self, slot: AnySlot) -> bool:
        if not self._is_there(slot):
            self.retire(lambda other: other is slot)
        return slot not in self._slots

    def _another(self, slot: AnySlot) -> AnySlot:
        """A free slot in exchange for one that was lost; the same where no other is free."""
        with self._changed:
            if not self._free:
                return slot
            other = self._choose()
            self._free.remove(other)
            self._release(slot)
            return other

    def _release(self, slot: AnySlot) -> None:
        """A slot has nothing to run: the next trial may have it, unless its device goes."""
        with self._changed:
            if slot in self._slots:
                self._free.append(slot)
                self._changed.notify_all()
                return
            with contextlib.suppress(RuntimeError):  # closed, with all slots
                self._threads.submit(self._end, slot)

    def _end(self, slot: AnySlot) -> None:
        slot.close()
        with contextlib.suppress(ValueError):  # another thread has
            self._leaving.remove(slot)


AnyShared = TypeVar("AnyShared", bound=SharedSlot)


class TurnsPool(SlotPool[AnyShared]):
    """Slots on devices that several searches take turns on: each has its device while it runs a trial, and keeps it for
    its next one as long as nobody else waits."""

    def __init__(
        self,
        slots: Sequence[AnyShared],
        is_there: Callable[[AnyShared], bool],
        is_used: Callable[[AnyShared], bool],
        tell: Callable[[], None],
    ) -> None:
        """
        Args:
            slots: those that there are now.
            is_there: whether the device of a slot whose trial was lost has not gone for good.
            is_used: whether others have the device of a free slot.
            tell: is called where a trial waits for its device for long, although it is its turn.
        """
        super().__init__(slots, is_there, is_used)
        self._tell = tell
        self._others_wait = False

    def share(self, others_wait: bool) -> None:
        """Others wait for devices, who get those that stand idle; or none does any more."""
        with self._changed:
            self._others_wait = others_wait
            idle, self._free = (self._free, []) if others_wait else ([], self._free)
        for slot in idle:
            with contextlib.suppress(RuntimeError):  # closed, with all slots
                self._threads.submit(self._leave, slot)

    def _leave(self, slot: AnyShared) -> None:
        slot.leave_device()
        super()._release(slot)

    def _release(self, slot: AnyShared) -> None:
        with self._changed:
            if not self._others_wait or slot not in self._slots:
                super()._release(slot)
                return
        self._leave(slot)

    def _choose(self) -> AnyShared:
        """One that has its device, if any has: no second one is held beside it."""
        held = next((slot for slot in reversed(self._free) if slot.has_device), None)
        return held or super()._choose()

    def _ready(self, slot: AnyShared, number: int) -> AnyShared | None:
        """Once it has its device; or another, where others use that meanwhile."""
        found: AnyShared | None = slot
        waited_s = 0.0
        while found is not None and not found.gets_device(_LOOK_S):
            if waited_s < _PATIENCE_S <= waited_s + _LOOK_S:
                self._tell()
            waited_s += _LOOK_S
            found = self._instead(found, number)
        return found

    def _instead(self, slot: AnyShared, number: int) -> AnyShared | None:
        """A free slot whose device nobody uses, in place of one that is waited for; the same where there is none."""
        with self._changed:
            is_left = slot in self._slots
            other = next((each for each in reversed(self._free) if is_left and not self._is_used(each)), None)
            if is_left and other is None:
                return slot
            if other is not None:
                self._free.remove(other)
        self._leave(slot)
        return other or self._take(number)


class Joining(Generic[AnyShared]):
    """Slots that a pool gets once their devices are free. Else a trial would wait for a device that others use while
    another stands idle."""

    def __init__(self, pool: SlotPool[AnyShared], is_there: Callable[[AnyShared], bool]) -> None:
        """
        Args:
            pool: that gets them; one of turns at once, for its trials wait for their devices.
            is_there: whether the device of one that is up has not gone meanwhile.
        """
        self._pool, self._is_there = pool, is_there
        self._has_one = threading.Event()
        self.tell: Callable[[], None] = lambda: None
        """Is called when one has joined."""

    def begin(self, slots: Iterable[AnyShared]) -> None:
        """Wait for their devices, each in a thread of its own."""
        for slot in slots:
            if isinstance(self._pool, TurnsPool):
                self._has_come(slot)
            else:
                threading.Thread(target=self._join, args=(slot,), daemon=True).start()

    def wait_for_one(self, tell: Callable[[], None]) -> None:
        """Until one has joined; ``tell`` is called, once, where that takes long."""
        if not self._has_one.wait(_PATIENCE_S):
            tell()
            self._has_one.wait()

    def _join(self, slot: AnyShared) -> None:
        while not slot.gets_device(_LOOK_S) and self._is_there(slot):
            pass
        if self._is_there(slot):
            self._has_come(slot)

    def _has_come(self, slot: AnyShared) -> None:
        self._pool.add(slot)
        self._has_one.set()
        self.tell()
