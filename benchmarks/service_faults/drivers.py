"""Faults of drivers: killed, stopped, deaf, with a daemon, with too much to say."""

from __future__ import annotations

import os
import signal
import time

from autotune.workers.process import identify

from .core import ANY_END, Fault
from .scene import LEASE_S, POINTS, Scene
from .servers import kill_server

__all__ = ["FAULTS"]

_MIB = 2**20


def _kill(the: Scene) -> None:
    """SIGKILL of the driver."""
    os.kill(the.pid(), signal.SIGKILL)
    the.go()


def _pause(the: Scene) -> None:
    """SIGSTOP of the driver past the lease."""
    pid = the.pid()
    os.kill(pid, signal.SIGSTOP)
    the.go()
    time.sleep(LEASE_S + 0.2)
    os.kill(pid, signal.SIGCONT)


def _pause_and_kill_server(the: Scene) -> None:
    """SIGSTOP of the driver and SIGKILL of its server: the next starts another driver, and nothing wakes the first."""
    pid = the.pid()
    os.kill(pid, signal.SIGSTOP)
    the.server.end(signal.SIGKILL)
    the.restart()
    watched = the.blocker or the.search_id
    the.until(lambda: the.row(watched)["attempt"] >= 2 or the.row(watched)["ended_at"], "the second driver")
    assert identify(pid) is None, "the first driver is still there beside the second"
    the.go()


def _kill_both(the: Scene) -> None:
    """SIGKILL of the driver and the server."""
    pid = the.pid()
    the.server.end(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    the.restart()
    the.go()


def _cancel_deaf(the: Scene) -> None:
    """Cancelled at once, and it does not listen: it is killed."""
    the.server.client.cancel(the.search_id, "now")


RUNS = tuple(point for point in POINTS if point not in ("queued", "cancelling"))
"""A driver that is deaf cannot be brought to ``cancelling``."""
FAULTS = (
    Fault("driver killed", _kill),
    Fault("driver stopped past the lease", _pause),
    Fault("driver stopped, server killed", _pause_and_kill_server),
    Fault("driver and server killed", _kill_both),
    Fault("driver leaves a daemon, and is killed", _kill, script=(("daemon", 1),)),
    Fault("driver leaves a daemon, server killed", kill_server, script=(("daemon", 1),)),
    Fault("driver prints 8 MiB, and is killed", _kill, script=(("flood", 8 * _MIB),)),
    Fault("driver is deaf, cancelled now", _cancel_deaf, RUNS, ANY_END, (("deaf", 1),)),
)
