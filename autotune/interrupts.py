"""What Ctrl-C does to trials that are running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts"]


@contextmanager
def interrupts(
    stop: threading.Event, close: Callable[[], None], interrupted: Callable[[], bool] | None = None
) -> Iterator[None]:
    """The first Ctrl-C sets ``stop``; the second also ends the running trials; a third gives up waiting for either.

    SIGTERM and a terminal that closes count as one.

    Args:
        stop: is set by the first.
        close: ends the running trials.
        interrupted: is called by the first, and says whether that ends what runs, too; None always does.
    """
    closer = threading.Thread(target=close, name="close")  # not in the handler: what it interrupts may hold a lock

    def handle(signum: int, frame: FrameType | None) -> None:
        is_first = not stop.is_set()
        stop.set()
        if is_first and interrupted is not None and not interrupted():
            return
        if closer.ident is None:
            closer.start()
        else:
            raise KeyboardInterrupt

    ignored = signal.SIG_IGN
    signals = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != ignored]
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if closer.ident is not None:
            closer.join()
