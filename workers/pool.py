"""Executors that have slots: a thread each, first come first served, and another try where a trial was lost."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from ._base import Executor
from .outcome import STOPPED, Lost, Outcome
from .request import TrialRequest

__all__ = ["Slot", "SlotPool", "done"]

_PAUSES_S = (0.0, 3.0)
"""Before each further try: a server that was killed is started again at once, a full disk may be cleared soon."""
_LOOK_S = 0.5
"""How often who waits for a slot looks whether any is left."""
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


class SlotPool(Executor):
    """An executor over some slots, which may come and go."""

    def __init__(self, slots: Sequence[Slot], is_there: Callable[[Slot], bool] = lambda slot: True) -> None:
        """
        Args:
            slots: those that there are now.
            is_there: whether the device of a slot whose trial was lost has not gone for good.
        """
        self._slots, self._is_there = list(slots), is_there
        self._free: queue.LifoQueue[Slot] = queue.LifoQueue()  # a slot that has run is warm
        for slot in slots:
            self._free.put(slot)
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="autotune-slot")
        self._closing = threading.Event()

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        """Those that are left."""
        return len(self._slots)

    def add(self, slot: Slot) -> None:
        """A device has come."""
        self._slots.append(slot)
        self._free.put(slot)

    def retire(self, has_gone: Callable[[Slot], bool]) -> None:
        """Devices have gone: nothing is started there any more, and what runs there is lost, and run elsewhere."""
        for slot in [slot for slot in self._slots if has_gone(slot)]:
            with contextlib.suppress(ValueError):  # another thread has
                self._slots.remove(slot)

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request."""
        try:
            return self._threads.submit(self._run, request)
        except RuntimeError:  # closed, by another thread maybe
            return done(STOPPED)

    def close(self) -> None:
        """End every process of every slot. Futures still open get ``Crashed``."""
        self._closing.set()
        for slot in list(self._slots):
            slot.close()
        self._threads.shutdown()

    def _run(self, request: TrialRequest) -> Outcome:
        """An outcome is never asked for again; a loss says nothing of the trial, so that is, twice. Each try has all of
        its deadline: with what another has left of it, a trial would seem to hang."""
        losses: list[str] = []
        slot = self._take()
        try:
            for pause_s in (0.0, *_PAUSES_S):
                if self._closing.wait(pause_s):
                    return STOPPED
                if slot is None:
                    losses.append("no device is left")
                    break
                outcome = slot.run(request)
                if not isinstance(outcome, Lost):
                    return outcome.model_copy(update={"where": slot.name})
                losses.append(outcome.message)
                slot = self._another(slot)
        finally:
            if slot is not None:
                self._free.put(slot)
        if self._closing.is_set():
            return STOPPED
        return Lost(message="; ".join(dict.fromkeys(losses)))

    def _take(self) -> Slot | None:
        """A free slot, once there is one; None where none is left."""
        while self._slots:
            with contextlib.suppress(queue.Empty):
                slot = self._free.get(timeout=_LOOK_S)
                if slot in self._slots:
                    return slot
        return None

    def _another(self, slot: Slot) -> Slot | None:
        """A free slot in exchange for one that was lost; the same where no other is free, unless that has gone."""
        if not self._is_there(slot):
            self.retire(lambda other: other is slot)
        if slot not in self._slots:
            return self._take()
        try:
            other = self._free.get_nowait()
        except queue.Empty:
            return slot
        self._free.put(slot)
        return other if other in self._slots else self._another(other)
