"""Processes whose parents were killed, and that nobody who still lives has started: a task's daemons, mostly.

They carry no mark of ours where they have cleared their environment, so that the process tree alone tells whose they
are: a process that adopts the orphans below it (Linux's child subreaper) and knows its own children ends all others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..measure.processes import children, descendants
from .process import become_subreaper

_PATIENCE_S = 10.0
"""How long killed processes may take to go: a device driver may hold them for a while."""

_lock = threading.Lock()
_own: set[int] | None = None
"""Children that this process has started itself; None where it does not adopt others."""


def adopt_orphans() -> None:
    """From now on this process gets the orphans below it. Only for a process that is ours alone: from here on it starts
    children by :func:`start_child`."""
    global _own
    if _own is None and become_subreaper():
        _own = set(children(os.getpid()))


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """``Popen``, of a child that is no orphan."""
    with _lock:
        process = subprocess.Popen(command, **options)
        if _own is not None:
            _own.add(process.pid)
        return process


def end_orphans() -> None:
    """End those that were adopted, with all that came of them; nothing where this process adopts none."""
    until_s = time.monotonic() + _PATIENCE_S
    with _lock:
        while _own is not None and (orphans := set(children(os.getpid())) - _own) and time.monotonic() < until_s:
            for pid in [*orphans, *(below for orphan in orphans for below in descendants(orphan))]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)
