"""What Ctrl-C does, to a command and to trials that are running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_PATIENCE_S = 20.0
"""How long running trials may take to end where a system, or a terminal that has closed, asks for it: nobody is there
to ask twice, and who asks mostly kills soon."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a terminal that closes raise ``KeyboardInterrupt``: once, so that nothing keeps a command
    from ending what it has started. Afterwards they are ignored: the command leaves with its exit code.
    """
    heard = threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    for number in _heeded():
        signal.signal(number, handle)
    try:
        yield
    finally:
        ignore_interrupts()


def ignore_interrupts() -> None:
    """From here on the command is done, and cleans up."""
    for number in _heeded():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupts(
    stop: threading.Event, close: Callable[[], None], interrupted: Callable[[], bool] | None = None
) -> Iterator[None]:
    """The first Ctrl-C sets ``stop``; the second also ends the running trials; a third gives up waiting for either.

    SIGTERM and a terminal that closes count as one, and as the second after :data:`_PATIENCE_S`.

    Args:
        stop: is set by the first.
        close: ends the running trials.
        interrupted: is called by the first, and says whether that ends what runs, too; None always does.
    """
    closer = threading.Thread(target=close, name="close")  # not in the handler: what it interrupts may hold a lock

    def end_trials() -> None:
        with suppress(RuntimeError):  # it is under way
            closer.start()

    patience = threading.Timer(_PATIENCE_S, end_trials)
    patience.daemon = True

    def handle(signum: int, frame: FrameType | None) -> None:
        is_first = not stop.is_set()
        stop.set()
        if is_first and interrupted is not None and not interrupted():
            if signum != signal.SIGINT:
                patience.start()
            return
        if closer.ident is None:
            end_trials()
        else:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in _heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        patience.cancel()
        if patience.ident is not None:
            patience.join()
        if closer.ident is not None:
            closer.join()


def _heeded() -> list[signal.Signals]:
    """Of the signals that ask for an end, those that are not ignored: a shell has what it runs in the background ignore
    Ctrl-C."""
    return [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
