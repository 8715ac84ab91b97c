"""The executor contract: who runs isolated trials."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Self

from ..errors import TrialsLost
from .outcome import Lost, Outcome
from .request import TrialRequest

_WAIT_S = 0.2


def ended(futures: Collection[Future[Outcome]]) -> set[Future[Outcome]]:
    """Those that have ended, as soon as one has.

    It never waits for long at once: a signal that comes between Python's last look for one and a wait is handled when
    that wait ends.
    """
    while not (found := wait(futures, _WAIT_S, FIRST_COMPLETED).done):
        pass
    return found


def result_of(future: Future[Outcome]) -> Outcome:
    """What a trial came to.

    Raises:
        TrialsLost: what runs trials failed, time and again.
    """
    outcome = future.result()
    if isinstance(outcome, Lost):
        raise TrialsLost(f"trials cannot be run: {outcome.message}")
    return outcome


class Executor(ABC):
    """Runs trial requests somewhere, each in a process of its own. Use as a context manager."""

    num_slots: int
    """Trials that run at once: one per device."""
    device_type: str = ""
    """Name and memory of its devices, which are all alike; empty where nothing says."""

    @abstractmethod
    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request. The future gets an outcome whatever a trial did; it raises ``TrialsLost`` only where there
        is nothing left that could run one."""

    def ask(self, request: TrialRequest) -> Outcome:
        """Submit a request and wait for its outcome.

        Raises:
            TrialsLost: what runs trials failed, time and again.
        """
        future = self.submit(request)
        ended([future])
        return result_of(future)

    def share(self, others_wait: bool) -> None:  # noqa: B027
        """Hear whether searches that take turns with this one wait for devices: they get those that stand idle. Most
        executors hold none between trials."""

    @abstractmethod
    def close(self) -> None:
        """End every process this executor started, and their descendants. Futures still open get ``Crashed``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
