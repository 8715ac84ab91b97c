"""How much of a training's time other work took: by the training's own windows, and by time spent waiting for a
processor."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

import torch

from ...ranks import world_size
from ..processes import descendants, read, stat_of
from .speed import Window

_USUAL = 0.75
"""Quantile of processor time over wall time, of the windows, that counts as an undisturbed window's."""
_TOLERANCE = 0.9
"""A window with less than this share of the usual processor time was disturbed."""


def disturbed_share(windows: Sequence[Window]) -> float:
    """Share of the windows' time that other work took, or a pause: as was seen of each, or as their processor time
    tells."""
    seen_s = sum(window.others_s for window in windows)
    return min(1.0, max(missing_share(windows), seen_s / sum(window.elapsed_s for window in windows)))


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


class Pause(NamedTuple):
    """A moment at which the whole process stood still."""

    began_s: float
    """By ``time.perf_counter``, to a beat."""
    ended_s: float
    seconds: float
    """Of it, lost."""

    def within(self, began_s: float, ended_s: float) -> float:
        """Seconds lost between two moments."""
        overlap_s = min(self.ended_s, ended_s) - max(self.began_s, began_s)
        return self.seconds * max(0.0, overlap_s) / (self.ended_s - self.began_s)


class Pauses:
    """Watches from its creation for moments at which the whole process stood still: it, or its machine, was stopped.

    A window's time cannot tell a pause from waiting for data. A thread that should wake twenty times a second can.
    """

    def __init__(self, found: Sequence[Pause] = ()) -> None:
        self.found = [*found]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="autotune-pauses", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        is_ended, before_s, before_cpu_s = False, perf_counter(), process_time()
        while not is_ended:
            is_ended = self._ended.wait(_BEAT_S)
            now_s, cpu_s = perf_counter(), process_time()
            late_s, busy_s = now_s - before_s - _BEAT_S, cpu_s - before_cpu_s
            if late_s >= _LATE_S and busy_s < late_s / 2:  # else one call into C kept Python to itself
                self.found.append(Pause(before_s, now_s, late_s - busy_s))
            before_s, before_cpu_s = now_s, cpu_s


_SPAN_S = 0.5
"""Processor time is told in ticks of 10 ms, so that it bears out what was waited in several windows together."""
_NEGLIGIBLE = 0.01
"""Share of a span's time; less of it that was waited is taken as it is, and what others did is not looked up."""


class OtherWork:
    """Tells what other work took of each of consecutive windows: how long this process's threads were ready and had no
    processor, as far as the processor time of other processes bears it out (else they waited for each other), and
    pauses of the whole process."""

    def __init__(self) -> None:
        self._pauses = Pauses()
        self._times: list[tuple[float, float]] = []
        self._waits_s: list[float] = []
        self._num_borne_out = 0
        self._look, self._looked_s = _look(), perf_counter()

    def open(self) -> None:
        """A window begins, right after this."""
        self._opened_s, self._waited_s = perf_counter(), _waited_s()

    def close(self) -> None:
        """The window that was opened has ended, right before this."""
        self._times.append((self._opened_s, perf_counter()))
        self._waits_s.append(max(0.0, _waited_s() - self._waited_s))  # a thread that ended takes its own along
        self._bear_out()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Between two windows this process has nothing to do, and may be stopped: what others do meanwhile is no
        disturbance."""
        self._pauses.end()
        yield
        self._pauses = Pauses(self._pauses.found)
        self._look, self._looked_s, self._num_borne_out = _look(), perf_counter(), len(self._waits_s)

    def end(self) -> None:
        """No other window comes."""
        self._pauses.end()

    def seconds(self) -> list[float]:
        """Of each window so far; what was waited alone where the system tells nothing else."""
        return [
            waited_s + sum(pause.within(*times) for pause in self._pauses.found)
            for times, waited_s in zip(self._times, self._waits_s, strict=True)
        ]

    def _bear_out(self) -> None:
        """Cut what was waited since the last look to what others computed since then."""
        waits_s, elapsed_s = self._waits_s[self._num_borne_out :], perf_counter() - self._looked_s
        if elapsed_s < _SPAN_S or sum(waits_s) < _NEGLIGIBLE * elapsed_s:
            return
        before, self._look, self._looked_s = self._look, _look(), perf_counter()
        others_s = (self._look.busy_s - before.busy_s) - (self._look.own_s - before.own_s)
        share = min(1.0, max(0.0, others_s) / sum(waits_s))
        self._waits_s[self._num_borne_out :] = [share * waited_s for waited_s in waits_s]
        self._num_borne_out = len(self._waits_s)


class _Look(NamedTuple):
    busy_s: float
    """Processor time of everything, on the processors that this process may use."""
    own_s: float
    """Of this process and its descendants; of one of several ranks, of all of them."""


def _look() -> _Look:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    own_s = process_time() + sum(_ticks(pid) for pid in descendants()) * tick_s
    if world_size() > 1:  # the other ranks are no disturbance
        own_s = sum(_ticks(pid) for pid in descendants(os.getppid())) * tick_s
    return _Look(_busy_ticks() * tick_s, own_s)


def _busy_ticks() -> int:
    """user, nice, system, irq, softirq and steal. Source: https://docs.kernel.org/filesystems/proc.html"""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    rows = (line.split() for line in read(Path("/proc/stat")).splitlines())
    return sum(sum(int(row[at]) for at in (1, 2, 3, 6, 7, 8)) for row in rows if row and row[0] in mine)


def _ticks(pid: int) -> int:
    """User and system time of one process."""
    fields = stat_of(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _waited_s() -> float:
    """What this process's threads have spent ready, without a processor: the second figure of each one's ``schedstat``,
    nanoseconds. Source: https://docs.kernel.org/scheduler/sched-stats.html"""
    threads = Path("/proc/self/task")
    found = (read(thread / "schedstat").split() for thread in (threads.iterdir() if threads.is_dir() else ()))
    return sum(int(row[1]) for row in found if len(row) > 1) / 1e9


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: where processors are busy, threads wait for each other a hundred times longer than they
    compute on few numbers, and their waiting counts as the processor's time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
