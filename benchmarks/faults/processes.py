"""Processes, told from outside: who came of whom, with which environment, and an end for exactly those."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PATIENCE_S = 20.0


class Process(NamedTuple):
    """A process, told apart from a later one with the same pid."""

    pid: int
    start: int
    """Clock ticks from boot."""


def adopt_orphans() -> None:
    """Have whatever is started from here stay a descendant of this process: also daemons with no environment."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(pid: int) -> list[Process]:
    """Every living descendant, parents before children."""
    children: dict[int, list[Process]] = {}
    for process, parent in _all():
        children.setdefault(parent, []).append(process)
    found, queue = [], [pid]
    while queue:
        own = children.get(queue.pop(0), [])
        found += own
        queue += [process.pid for process in own]
    return found


def variables(process: Process) -> list[bytes]:
    """``NAME=value`` of the environment that it was started with; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return []


def words(process: Process) -> str:
    """Its command line; empty where it has gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def end(processes: list[Process]) -> None:
    """SIGKILL to each that is still the same process, and wait for those that became children of this one."""
    until_s = time.monotonic() + _PATIENCE_S
    left = processes
    while left and time.monotonic() < until_s:
        alive = {process for process, _ in _all()}
        left = [process for process in left if process in alive]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        reap()
        time.sleep(0.02)


def reap() -> None:
    """Wait for every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _all() -> Iterator[tuple[Process, int]]:
    """Every living process with its parent; what has ended and was not waited for is left out."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                yield Process(int(folder.name), int(fields[19])), int(fields[1])
