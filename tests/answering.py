"""An executor that runs nothing."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import Future

from autotune.workers import Executor, Outcome, TrialRequest
from autotune.workers.pool import done


class Answering(Executor):
    """Gives at once what :meth:`answer` says."""

    num_slots = 1

    @abstractmethod
    def answer(self, request: TrialRequest) -> Outcome: ...

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        return done(self.answer(request))

    def close(self) -> None: ...
