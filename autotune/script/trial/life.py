"""What a script does once a trial has its timing: the epoch ends early, so that it evaluates and saves as it does at an
epoch's end; until it begins the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ...measure.measurement import LifeOptions


class EpochsEnd:
    """Ends the epoch of the loaders that are trained on, and tells when the next begins, or the time is over."""

    def __init__(self, options: LifeOptions, ended: Callable[[], NoReturn]) -> None:
        """
        Args:
            options: how long the script may take.
            ended: is called once, from whatever thread.
        """
        self.most_s, self._ended = options.most_s, ended
        self._datasets: list[Any] = []
        self._once = threading.Lock()
        self._late: threading.Timer | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the epoch ends early."""
        return bool(self._datasets)

    def await_next(self, loaders: Sequence[Any]) -> None:
        """From now on the epoch of these ends."""
        self._datasets = [loader.dataset for loader in loaders]
        self._late = threading.Timer(self.most_s, self._end)
        self._late.daemon = True
        self._late.start()

    def ends(self, loader: Any) -> bool:
        """Whether a loader gives no more batches."""
        return any(loader.dataset is one for one in self._datasets)

    def begins(self, loader: Any) -> None:
        """An epoch of a loader begins: if it is trained on, the script has done what it does between two."""
        if self.ends(loader):
            self._end()

    def close(self) -> bool:
        """The script came to its end by itself; whether that is the first to tell."""
        if self._late is not None:
            self._late.cancel()
        return self._once.acquire(blocking=False)

    def _end(self) -> None:
        if self.close():
            self._ended()
