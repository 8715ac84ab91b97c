"""What the shares of unlike devices took: kept with the results, so that a search that goes on measures none again."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from ..searches.reuse import keep
from ..searches.store.results import Kept, Key, Results
from ..workers import Executor, Measured, MeasureRequest, Outcome, OutOfMemory, TrialRequest
from ..workers.pool import done


@dataclass(eq=False)
class Shares(Executor):
    """An executor that keeps what it measures, by the name of the request beside the settings."""

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
        limit, series = request.plan.budget.limit, self.results.series(self.key)
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
