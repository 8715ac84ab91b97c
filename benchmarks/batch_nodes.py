"""Two devices that answer from tables, on a clock of their own: it goes on only while every search waits for a run."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from autotune.batch.turns import Turns
from autotune.workers import Executor, MeasureRequest, Outcome, TrialRequest

_STILL_S = 0.25
"""Real time in which nothing may change before the clock goes on: a job that ended is followed by the next a moment
later."""


class Nodes(Executor):
    """Each run takes as long as its outcome says; what measures nothing takes no time."""

    num_slots = 2

    def __init__(self, answers: Executor) -> None:
        """
        Args:
            answers: gives outcomes at once, with their seconds.
        """
        self._answers = answers
        self._now, self._numbers, self._changed = 0.0, itertools.count(), time.monotonic()
        self._free = ["node-1", "node-2"]
        self._running: list[tuple[float, int, Future[Outcome], Outcome]] = []
        self._lock = threading.Lock()

    def clock(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """A future that is done when the clock says so."""
        with self._lock:
            answered = self._answers.submit(request)
            if not isinstance(request, MeasureRequest):
                return answered
            outcome = answered.result().model_copy(update={"where": self._free.pop()})
            future: Future[Outcome] = Future()
            heapq.heappush(self._running, (self._now + outcome.seconds, next(self._numbers), future, outcome))
            self._changed = time.monotonic()
            return future

    def close(self) -> None:
        """Nothing runs."""

    @contextmanager
    def going(self, turns: Turns) -> Iterator[None]:
        """The clock goes on as long as the body runs, while no search is awaited."""
        over = threading.Event()
        thread = threading.Thread(target=self._go, args=(turns, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _go(self, turns: Turns, over: threading.Event) -> None:
        while not over.wait(_STILL_S / 5):
            if turns.is_awaited() or time.monotonic() - self._changed < _STILL_S:
                continue
            with self._lock:
                if not self._running:
                    continue
                self._now, _, future, outcome = heapq.heappop(self._running)
                self._free.append(outcome.where)
                self._changed = time.monotonic()
            future.set_result(outcome)
