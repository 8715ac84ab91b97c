"""Executors that have slots: a thread each, first come first served, and another try where a trial was lost."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from ._base import Executor
from .outcome import STOPPED, Lost, Outcome
from .request import TrialRequest

__all__ = ["Slot", "SlotPool", "done"]

_PAUSES_S = (0.0, 3.0)
"""Before each further try: a server that was killed is started again at once, a full disk may be cleared soon."""


def done(outcome: Outcome) -> Future[Outcome]:
    """A future that has its outcome already."""
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


class Slot(Protocol):
    """Runs one trial at a time on a device of its own."""

    def run(self, request: TrialRequest) -> Outcome:
        """Run a trial: ``Lost`` where what runs trials has failed. The next call starts anew."""

    def close(self) -> None:
        """End everything this slot started, now; a trial that runs meanwhile is lost."""


class SlotPool(Executor):
    """An executor over some slots."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.num_slots = len(slots)
        self._slots = slots
        self._free: queue.LifoQueue[Slot] = queue.LifoQueue()  # a slot that has run is warm
        for slot in slots:
            self._free.put(slot)
        self._threads = ThreadPoolExecutor(len(slots), thread_name_prefix="autotune-slot")
        self._closing = threading.Event()

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request."""
        try:
            return self._threads.submit(self._run, request)
        except RuntimeError:  # closed, by another thread maybe
            return done(STOPPED)

    def close(self) -> None:
        """End every process of every slot. Futures still open get ``Crashed``."""
        self._closing.set()
        for slot in self._slots:
            slot.close()
        self._threads.shutdown()

    def _run(self, request: TrialRequest) -> Outcome:
        """An outcome is never asked for again; a loss says nothing of the trial, so that is, twice. Each try has all of
        its deadline: with what another has left of it, a trial would seem to hang."""
        losses: list[str] = []
        slot = self._free.get()
        try:
            for pause_s in (0.0, *_PAUSES_S):
                if self._closing.wait(pause_s):
                    return STOPPED
                outcome = slot.run(request)
                if not isinstance(outcome, Lost):
                    return outcome
                losses.append(outcome.message)
                slot = self._another(slot)
        finally:
            self._free.put(slot)
        if self._closing.is_set():
            return STOPPED
        return Lost(message="; ".join(dict.fromkeys(losses)))

    def _another(self, slot: Slot) -> Slot:
        """A free slot in exchange for one that was lost; the same where no other is free."""
        try:
            other = self._free.get_nowait()
        except queue.Empty:
            return slot
        self._free.put(slot)
        return other
