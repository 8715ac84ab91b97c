"""Executors of a batch. Jobs of one task explore one at a time, then their finalists run side by side with a shared
reference."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..searches.reuse import keep
from ..searches.store.measurements import Kept, Key, Results
from ..workers import Executor, Inspected, InspectRequest, Measured, MeasureRequest, Outcome, OutOfMemory, TrialRequest
from ..workers.pool import done
from .turns import Turn

_RECENT_S = 300.0
"""Seconds for which a run of the reference may be shared with another job's winner."""


@dataclass
class References:
    """Runs of the reference in fresh interpreters that jobs of one task have asked for, the newest of each round."""

    clock: Callable[[], float] = time.monotonic
    _asked: dict[str, tuple[float, Future[Outcome]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, turn: Turn, request: MeasureRequest) -> Future[Outcome]:
        """The run of this round, if another job has just asked for it; else a new one."""
        unbounded = request.plan.model_copy(update={"budget": type(request.plan.budget)()})  # it is held to none
        alike = request.with_deadline(1.0, 1.0).model_copy(update={"plan": unbounded})
        options = alike.options.model_copy(update={"budget": unbounded.budget})
        key = alike.model_copy(update={"options": options}).model_dump_json()
        with self._lock:
            at, future = self._asked.get(key, (0.0, None))
            if future is None or (future.done() and self.clock() - at > _RECENT_S):
                future = turn.submit(request)
                self._asked[key] = self.clock(), future
            else:
                turn.promise = None
                turn.park()
                future.add_done_callback(lambda _: turn.unpark())
            return future


@dataclass(eq=False)
class Sharing(Executor):
    """An executor for one job that shares the reference's runs with other jobs of its lane."""

    turn: Turn
    references: References

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        """That of the turn."""
        return self.turn.num_slots

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request."""
        if isinstance(request, MeasureRequest) and request.fresh and not request.options.enforce:
            return self.references.submit(self.turn, request)
        return self.turn.submit(request)

    def close(self) -> None:
        """The executor is not its own."""


@dataclass(eq=False)
class Inspecting(Executor):
    """An executor that inspects a task once for all jobs that ask for the same."""

    executor: Executor
    known: dict[str, Outcome]
    """What was found, by the request."""

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        """The executor's."""
        return self.executor.num_slots

    @property
    def device_type(self) -> str:  # type: ignore[override]
        """The executor's."""
        return self.executor.device_type

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request, or give what is known."""
        if not isinstance(request, InspectRequest):
            return self.executor.submit(request)
        key = request.with_deadline(1.0, 1.0).model_dump_json()
        if key in self.known:
            return done(self.known[key])
        future = self.executor.submit(request)
        future.add_done_callback(lambda ended: self._keep(key, ended))
        return future

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()

    def _keep(self, key: str, ended: Future[Outcome]) -> None:
        if ended.exception() is None and isinstance(found := ended.result(), Inspected):
            self.known[key] = found


@dataclass(eq=False)
class Shares(Executor):
    """An executor that keeps what shares of unlike devices take, by the name of the request beside the settings: a
    search that goes on measures none again."""

    executor: Executor
    results: Results
    key: Key
    """Of the task on this type of device, as it is today."""
    source: str
    """What asks."""
    goes_on: bool
    """Give what is known in place of measuring it."""
    num_measured: int = field(default=0, init=False)

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        """The executor's."""
        return self.executor.num_slots

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """A future that is done, as what was measured is kept first: who waits for it gets the store's errors."""
        if not isinstance(request, MeasureRequest):
            return self.executor.submit(request)
        limit, series = request.plan.budget.of_device, self.results.series(self.key)
        known = self.results.known(self.key, series, request.id).get(request.applied.canonical())
        if self.goes_on and known is not None and known.limit_bytes == limit:
            return done(known.outcome)
        self.num_measured += 1
        outcome = self.executor.ask(request)
        if isinstance(outcome, Measured | OutOfMemory):
            keep(self.results, self.key, series, Kept(request.applied, outcome, limit, self.source), request.id)
        return done(outcome)

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()
