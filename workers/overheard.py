"""What trials print, passed on as each ends: ``--verbose``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from ._base import Executor
from .outcome import Outcome, sides_of
from .request import TrialRequest


class Overheard(Executor):
    """An executor whose trials' output is heard before anyone has their outcomes."""

    def __init__(self, executor: Executor, hear: Callable[[str, str], None]) -> None:
        """
        Args:
            executor: runs the trials, and is closed with this.
            hear: is given a request's name and what it printed, in a thread of the executor's. It never raises.
        """
        self.device_type = executor.device_type
        self._executor, self._hear = executor, hear

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        """The executor's."""
        return self._executor.num_slots

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request."""
        heard: Future[Outcome] = Future()

        def pass_on(ended: Future[Outcome]) -> None:
            if (error := ended.exception()) is not None:  # the executor's own, such as a cluster that died
                heard.set_exception(error)
                return
            outcome = ended.result()
            for one in sides_of(outcome):
                if one is not None and one.output:
                    self._hear(request.id, one.output)
            heard.set_result(outcome)

        self._executor.submit(request).add_done_callback(pass_on)
        return heard

    def share(self, others_wait: bool) -> None:
        """As the executor does."""
        self._executor.share(others_wait)

    def close(self) -> None:
        """End what the executor started."""
        self._executor.close()
