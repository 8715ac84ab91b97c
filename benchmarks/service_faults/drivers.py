"""Faults of drivers: killed, stopped, deaf, with a daemon, with too much to say."""

from __future__ import annotations

import os
import signal
import time

from autotune.workers.process import identify

from .core import ANY_END, Fault
from .memory import MemoryLimit
from .scene import LEASE_S, POINTS, Scene
from .servers import kill_server

_MIB = 2**20
_PRINTED_MIB, _EACH_MIB_S = 1024, 0.02
"""Of a driver that floods: more than its disk holds, and so fast."""
_MOST_LOG, _MOST_GROWTH = 256 * 2**10, 64 * _MIB


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


def _run_out_of_memory(the: Scene) -> None:
    """The driver takes more memory than it may: the kernel kills it."""
    takes = the.path(the.blocker or the.search_id) / "takes"
    pid = the.pid()
    with MemoryLimit(64 * _MIB) as limit:
        limit.add(pid)
        takes.touch()
        the.until(limit.num_kills, "the kernel to kill the driver")
        takes.unlink()
    the.go()


def _print(the: Scene) -> None:
    """The driver has printed 1 GiB, far more than its disk holds: the end of it is kept, and the server has not
    grown."""
    watched = the.blocker or the.search_id
    kept = (the.path(watched) / "driver.log").stat().st_size
    assert kept < 32 * _MIB, f"{kept / _MIB:.0f} MiB of it are kept"
    assert len(the.server.client.text(watched, "log")) <= _MOST_LOG
    assert the.server.resident_bytes() - the.began_bytes < _MOST_GROWTH
    the.go()


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
    Fault("driver prints 1 GiB", _print, ("trial",), script=(("flood", _PRINTED_MIB * _MIB), ("flood_s", _EACH_MIB_S))),
    Fault("driver killed by the kernel, for memory", _run_out_of_memory, with_limit=True),
    Fault("driver is deaf, cancelled now", _cancel_deaf, RUNS, ANY_END, (("deaf", 1),)),
)
