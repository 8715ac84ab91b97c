"""``alarm``: ends code of the user's that may have no end of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LEAST_S = 0.01
"""Between two signals: more of them would leave the block no time."""


@contextmanager
def alarm(every_s: float, ring: Callable[[], None]) -> Iterator[None]:
    """Call ``ring`` every so many seconds while the block runs; an exception that it raises ends the block. Signals
    reach the main thread alone: in another thread nothing is called.

    Args:
        every_s: seconds between two calls; at least a hundredth.
        ring: called wherever the block is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def rings(*_: Any) -> None:
        ring()

    before = signal.signal(signal.SIGALRM, rings)
    every_s = max(every_s, _LEAST_S)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
