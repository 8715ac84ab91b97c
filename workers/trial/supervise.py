"""Watching one trial: its output, its deadline, its memory, its end, and whether anybody still wants the answer."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...measure.processes import descendants
from ..process import charged_bytes, is_stopped, num_oom_kills, resident_bytes, send_signal
from .spawn import Child

_KEPT_BYTES = 32 * 1024
_READ_BYTES = 256 * 1024
_MEMORY_INTERVAL_S = 0.1
_STACK_GRACE_S = 1.0
"""How long a trial at its deadline has to write its Python stack."""
_POLL_S = 0.02
"""How often to look whether the trial has ended, where the system has no pidfd."""
_STOPPED_INTERVAL_S = 5.0
_MOST_STOPPED_S = 30.0
"""How long a trial may stand stopped (SIGSTOP) before it counts as forgotten."""
_PATIENCE_S = 10.0
"""How long killed processes may take to go: a device driver may hold them for a while."""


class Capture:
    """Drains a pipe and keeps its first and last 32 KiB, so that a flood costs no memory."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._head = b""
        self._tail = b""
        self._num_dropped = 0

    def read(self) -> int | None:
        """Take some of what is there: how many bytes; None when there is nothing now, 0 when nobody can write more."""
        try:
            data = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return None
        room = _KEPT_BYTES - len(self._head)
        self._head += data[:room]
        tail = self._tail + data[room:]
        self._tail = tail[-_KEPT_BYTES:]
        self._num_dropped += len(tail) - len(self._tail)
        return len(data)

    def text(self) -> str:
        """What was printed; a line says where some was left out."""
        gap = f"\n[... {self._num_dropped} bytes left out ...]\n".encode() if self._num_dropped else b""
        return (self._head + gap + self._tail).decode(errors="replace")


@dataclass(frozen=True)
class Limits:
    """What a trial may use."""

    deadline_s: float
    memory_bytes: int | None
    is_lifted: Callable[[], bool] = lambda: False
    """Asked of a trial over its memory: True leaves it alone."""
    speaker: Callable[[], int | None] = lambda: None
    """Which process writes the trial's stack, where it is not the one that was started."""
    compiled_s: Callable[[], float] = lambda: 0.0
    """Asked of a trial at its deadline: how long it has compiled, by which the deadline is put off."""
    most_compiling_s: float = 0.0
    """By how much at most."""
    takes_turns: bool = False
    """Whether it is stopped (SIGSTOP), and continued, by who measures it by turns with another."""


@dataclass(frozen=True)
class Ending:
    """How a trial's process ended."""

    status: int
    """As ``os.wait4`` gives it."""
    ended_for: Literal["deadline", "memory", "stopped"] | None
    """Why the supervisor ended it; None where it ended by itself."""
    peak_bytes: int
    """The most memory that was seen charged."""
    oom_killed: bool
    """Whether the kernel killed a process for memory meanwhile."""
    seconds: float
    output: str
    put_off_s: float = 0.0
    """By how much compiling put the deadline off."""


def supervise(child: Child, limits: Limits, client: socket.socket) -> Ending | None:
    """Wait for a trial's end, or bring it about.

    Returns:
        How it ended, with all its descendants gone; None when the client has gone, and nothing was ended yet.
    """
    oom_kills = num_oom_kills()
    watch = _Watch(child, limits, client)
    try:
        waited = watch.until_exit()
        if waited is None:
            return None
        status, usage = waited
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        end_descendants()
        return Ending(
            status=status,
            ended_for=watch.ended_for,
            peak_bytes=max(watch.charged_bytes, usage.ru_maxrss * 1024),
            oom_killed=num_oom_kills() > oom_kills,
            seconds=time.monotonic() - watch.started_s,
            output=watch.rest_of_output(),
            put_off_s=watch.put_off_s,
        )
    finally:
        watch.close()


def end_descendants() -> None:
    """End every descendant of this process, and of a subreaper also those whose parents are gone."""
    until_s = time.monotonic() + _PATIENCE_S
    while _reap() and time.monotonic() < until_s:
        send_signal([*descendants()])
        time.sleep(0.001)


def _reap() -> bool:
    """Wait for every child that has ended; whether others remain."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


class _Watch:
    """The event loop around one trial."""

    def __init__(self, child: Child, limits: Limits, client: socket.socket) -> None:
        self.ended_for: Literal["deadline", "memory", "stopped"] | None = None
        self.charged_bytes = 0
        self.put_off_s = 0.0
        self.started_s = time.monotonic()
        self._pid = child.pid
        self._limits = limits
        self._client = client
        self._output = child.output
        self._capture = Capture(child.output)
        self._next_look_s = self.started_s
        self._next_stopped_look_s = self.started_s + _STOPPED_INTERVAL_S
        self._stopped_since_s: float | None = None
        self._deadline_s = self.started_s + limits.deadline_s
        self._exit = _pidfd(child.pid)
        self._selector = selectors.DefaultSelector()
        for source in (client, child.output, self._exit):
            if source is not None:
                self._selector.register(source, selectors.EVENT_READ)

    def until_exit(self) -> tuple[int, resource.struct_rusage] | None:
        """Wait status and resource usage of the trial; None when the client has gone."""
        while True:
            pid, status, usage = os.wait4(self._pid, os.WNOHANG)
            if pid:
                return status, usage
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fileobj is self._client:
                    return None
                if key.fileobj == self._output and self._capture.read() == 0:
                    self._selector.unregister(self._output)  # every writer has closed it; it would stay readable
            self._hold_limits()

    def rest_of_output(self) -> str:
        """All that was printed, once nobody is left to print."""
        while self._capture.read():
            pass
        return self._capture.text()

    def close(self) -> None:
        """Let go of the trial's file descriptors."""
        self._selector.close()
        os.close(self._output)
        if self._exit is not None:
            os.close(self._exit)

    def _timeout_s(self) -> float | None:
        now_s = time.monotonic()
        moments = [self._deadline_s]
        if self._limits.memory_bytes is not None and self.ended_for is None:
            moments.append(self._next_look_s)
        if self._watches_stops():
            moments.append(self._next_stopped_look_s)
        if self._exit is None:
            moments.append(now_s + _POLL_S)
        soonest_s = min(moments) - now_s
        return None if soonest_s == math.inf else max(0.0, soonest_s)

    def _hold_limits(self) -> None:
        now_s, limit = time.monotonic(), self._limits.memory_bytes
        if self._deadline_s <= now_s and self.ended_for is None:
            self.put_off_s = min(self._limits.compiled_s(), self._limits.most_compiling_s)
            self._deadline_s = self.started_s + self._limits.deadline_s + self.put_off_s
        if now_s >= self._deadline_s:
            if self.ended_for is None:
                # The trial's faulthandler writes its Python stack, and then the trial has had its time.
                self.ended_for = "deadline"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._limits.speaker() or self._pid, signal.SIGUSR1)
                self._deadline_s = now_s + _STACK_GRACE_S
            else:
                os.kill(self._pid, signal.SIGKILL)
                self._deadline_s = math.inf
        elif self._watches_stops() and now_s >= self._next_stopped_look_s:
            self._next_stopped_look_s = now_s + _STOPPED_INTERVAL_S
            self._look_whether_stopped(now_s)
        elif limit is not None and self.ended_for is None and now_s >= self._next_look_s:
            self._next_look_s = now_s + _MEMORY_INTERVAL_S
            # The exact figure walks page tables; it is asked for only where the cheap bound is over.
            if resident_bytes(self._pid) > limit and (charged := charged_bytes(self._pid)) > limit:
                if self._limits.is_lifted():
                    return
                self.ended_for, self.charged_bytes = "memory", charged
                os.kill(self._pid, signal.SIGKILL)

    def _watches_stops(self) -> bool:
        return self.ended_for is None and not self._limits.takes_turns

    def _look_whether_stopped(self, now_s: float) -> None:
        if not is_stopped(self._pid):
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now_s
        elif now_s - self._stopped_since_s >= _MOST_STOPPED_S:
            self.ended_for = "stopped"
            os.kill(self._pid, signal.SIGKILL)


def _pidfd(pid: int) -> int | None:
    """A file descriptor that becomes readable when the process ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
