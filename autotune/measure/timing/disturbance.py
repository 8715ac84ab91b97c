"""How much of a training's time other work took: by the training's own windows, and by time spent waiting for a
processor."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from ...ranks import world_size
from ..processes import descendants
from .speed import Window

__all__ = ["OtherWork", "Pauses", "missing_share"]

_USUAL = 0.75
"""Quantile of processor time over wall time, of the windows, that counts as an undisturbed window's."""
_TOLERANCE = 0.9
"""A window with less than this share of the usual processor time was disturbed."""


def missing_share(windows: Sequence[Window]) -> float:
    """Share of the windows' time in which the training was kept from computing, compared with its better windows.

    A process that is paused, or loses its processors, gets no processor time while the clock runs. Time that it waits
    for data does not count.
    """
    computing_s = [max(window.elapsed_s - window.wait_s, 1e-9) for window in windows]
    rates = sorted(window.cpu_s / seconds for window, seconds in zip(windows, computing_s, strict=True))
    usual = rates[int(_USUAL * (len(rates) - 1))]
    if usual <= 0:
        return 0.0
    missing_s = 0.0
    for window, seconds in zip(windows, computing_s, strict=True):
        if window.cpu_s < _TOLERANCE * usual * seconds:
            missing_s += seconds - window.cpu_s / usual
    return missing_s / sum(window.elapsed_s for window in windows)


_BEAT_S = 0.05
_LATE_S = 0.5
"""Delay of a wake-up, seconds, from which on it counts as a pause; another thread that holds Python's lock delays one
by milliseconds."""


class Pauses:
    """Watches from its creation for moments at which the whole process stood still: it, or its machine, was stopped.

    A window's time cannot tell a pause from waiting for data. A thread that should wake twenty times a second can.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="autotune-pauses", daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        """Wall time of all pauses; ends the watching."""
        self._ended.set()
        self._thread.join()
        return self._seconds

    def _watch(self) -> None:
        is_ended, before_s, before_cpu_s = False, perf_counter(), process_time()
        while not is_ended:
            is_ended = self._ended.wait(_BEAT_S)
            now_s, cpu_s = perf_counter(), process_time()
            late_s, busy_s = now_s - before_s - _BEAT_S, cpu_s - before_cpu_s
            if late_s >= _LATE_S and busy_s < late_s / 2:  # else one call into C kept Python to itself
                self._seconds += late_s - busy_s
            before_s, before_cpu_s = now_s, cpu_s


class OtherWork:
    """Watches from its creation how much processor time other processes take on this one's processors."""

    def __init__(self) -> None:
        self._began = _look()

    def seconds(self) -> float:
        """Processor time, so far, that others took while a thread of this process was ready and had no processor; 0
        where the system does not tell."""
        now = _look()
        others_s = (now.busy_s - self._began.busy_s) - (now.own_s - self._began.own_s)
        return max(0.0, min(now.waited_s - self._began.waited_s, others_s))


@dataclass(frozen=True)
class _Look:
    busy_s: float
    """Processor time of everything, on the processors that this process may use."""
    own_s: float
    """Of this process and its descendants; of one of several ranks, of all of them."""
    waited_s: float
    """What this process's threads spent ready, without a processor."""


def _look() -> _Look:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    own_s = process_time() + sum(_ticks(pid) for pid in descendants()) * tick_s
    if world_size() > 1:  # the other ranks are no disturbance
        own_s = sum(_ticks(pid) for pid in descendants(os.getppid())) * tick_s
    return _Look(_busy_ticks() * tick_s, own_s, _waited_ns() / 1e9)


def _busy_ticks() -> int:
    """user, nice, system, irq, softirq and steal. Source: https://docs.kernel.org/filesystems/proc.html"""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    rows = (line.split() for line in _read(Path("/proc/stat")).splitlines())
    return sum(sum(int(row[at]) for at in (1, 2, 3, 6, 7, 8)) for row in rows if row and row[0] in mine)


def _ticks(pid: int) -> int:
    """User and system time of one process."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if fields else 0


def _waited_ns() -> int:
    """Second figure of each thread's ``schedstat``. Source: https://docs.kernel.org/scheduler/sched-stats.html"""
    threads = Path("/proc/self/task")
    found = (_read(thread / "schedstat").split() for thread in (threads.iterdir() if threads.is_dir() else ()))
    return sum(int(row[1]) for row in found if len(row) > 1)


def _read(path: Path) -> str:
    """Its text; empty where its process has gone, or the system has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
