"""Processes by pid and start time, since a pid alone may have been handed to a stranger: small facts of them, and how
those are ended that nobody else would end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..measure.processes import beside_bytes, children, descendants, prctl, read, stat_of

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PATIENCE_S = 15.0
"""How long killed processes may take to go: a device driver may hold them for a while."""
_ORPHANS_PATIENCE_S = 10.0
"""The same, of orphans."""

_starting = threading.Lock()
_own: set[int] | None = None
"""Children that this process has started itself; None where it does not adopt the orphans below it."""


class ProcessId(NamedTuple):
    """A process, told apart from a later one with the same pid."""

    pid: int
    start: int
    """Clock ticks from boot to its start; 0 where there is no /proc."""


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None when it has ended, waited for or not."""
    fields = stat_of(pid)
    return ProcessId(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs."""
    return identify(process.pid) == process


def is_stopped(pid: int) -> bool:
    """Whether it stands still, by SIGSTOP or a like signal, until someone continues it."""
    return stat_of(pid)[:1] == ["T"]


def name_of(process: ProcessId) -> str:
    """The file name of the program that it runs; empty where it cannot be read."""
    return Path(read(_PROC / str(process.pid) / "cmdline").partition("\0")[0]).name


def name_of_ended(pid: int) -> str | None:
    """The name of a process that has ended and that its parent has not waited for; None of any other."""
    name, _, rest = read(_PROC / str(pid) / "stat").partition("(")[2].rpartition(")")
    return name if rest.split()[:1] == ["Z"] else None


def with_variable(assignment: str) -> list[ProcessId]:
    """Running processes that were started with ``NAME=value`` in their environment, or forked from one that was.

    What finds a process whose parents are all gone; other users' processes cannot be read and are left out.
    """
    wanted = assignment.encode()
    found = []
    for name in os.listdir(_PROC) if _PROC.is_dir() else ():
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"{_PROC}/{name}/environ", "rb", buffering=0) as file:
            if wanted in file.read().split(b"\0") and (process := identify(int(name))):
                found.append(process)
    return found


def fork() -> int:
    """As ``os.fork``, without its warning of threads."""
    # numpy's OpenBLAS starts a thread at import, and stops it around forks by itself; Python 3.12 warns of any thread.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def become_subreaper() -> bool:
    """Have orphaned descendants become children of this process; False where the system cannot."""
    return prctl(_PR_SET_CHILD_SUBREAPER, 1)


def send_signal(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """A signal to each that is there and may be sent one."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end(processes: Iterable[ProcessId]) -> None:
    """SIGKILL to each that is still the same process."""
    send_signal(process.pid for process in processes if is_alive(process))


def end_all_with(assignment: str) -> None:
    """SIGKILL to every process of :func:`with_variable`, and again to what they started meanwhile."""
    until_s = time.monotonic() + _PATIENCE_S
    while (left := with_variable(assignment)) and time.monotonic() < until_s:
        end(left)
        time.sleep(0.01)


def adopt_orphans() -> None:
    """From now on this process gets the orphans below it. Only for a process that is ours alone: from here on it starts
    children by :func:`start_child`."""
    global _own
    if _own is None and become_subreaper():
        _own = set(children(os.getpid()))


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """``Popen``, of a child that is no orphan."""
    with _starting:
        process = subprocess.Popen(command, **options)
        if _own is not None:
            _own.add(process.pid)
        return process


def end_orphans() -> None:
    """End those that were adopted, with all that came of them; nothing where this process adopts none.

    They carry no mark of ours where they have cleared their environment (a task's daemons, mostly), so that the process
    tree alone tells whose they are.
    """
    until_s = time.monotonic() + _ORPHANS_PATIENCE_S
    with _starting:
        while _own is not None and (orphans := set(children(os.getpid())) - _own) and time.monotonic() < until_s:
            send_signal([*orphans, *(below for orphan in orphans for below in descendants(orphan))])
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants, shared pages counted in each: an upper bound, cheap to read."""
    return sum(map(_own_resident_bytes, (pid, *descendants(pid))))


def charged_bytes(pid: int) -> int:
    """Resident memory of a process that this one has started, plus what its descendants take beside it: the smaller of
    two looks, since what a process that begins or ends meanwhile shares would count twice."""
    return min(_own_resident_bytes(pid) + beside_bytes(pid, os.getpid()) for _ in range(2))


def _own_resident_bytes(pid: int) -> int:
    statm = read(_PROC / str(pid) / "statm").split()
    return int(statm[1]) * os.sysconf("SC_PAGE_SIZE") if statm else 0


def num_oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot, on the whole machine; 0 where it does not say."""
    counts = (line.split() for line in read(_PROC / "vmstat").splitlines())
    return next((int(value) for name, value in counts if name == "oom_kill"), 0)


def unnamed_file() -> BinaryIO:
    """What a process may print to: nobody can remove it, and no full disk is in its way."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("autotune-output"), "w+b")
    return tempfile.TemporaryFile()


def text_of(file: BinaryIO) -> str:
    """What was printed to it."""
    file.seek(0)
    return file.read().decode(errors="replace").strip()
