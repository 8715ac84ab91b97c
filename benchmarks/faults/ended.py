"""A command at work and how it ended: exit code, what it said, what it cost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.02
LONG_S = 120.0
"""What takes seconds here may take so long beside others."""


class NoEnd(Exception):
    """What was waited for did not come; the message says what."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code; the negated number of the signal that ended it."""
    out: str
    err: str
    cpu_s: float
    """Of its process and of those it waited for."""

    @property
    def last(self) -> str:
        """The last line that it said."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1][:160] if lines else "(silence)"


class Running:
    """A command at work; what it prints goes to files."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process, self._out, self._err = process, out, err
        self._cpu_s = 0.0

    @property
    def pid(self) -> int:
        """Its process's."""
        return self.process.pid

    def said(self) -> str:
        """Its stderr so far."""
        return self._err.read_text(encoding="utf-8", errors="replace")

    def has_ended(self) -> bool:
        """Whether it has; it is waited for then."""
        if self.process.returncode is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self._cpu_s = usage.ru_utime + usage.ru_stime
        return self.process.returncode is not None

    def wait_for(self, pattern: str, timeout_s: float = LONG_S, since: int = 0) -> None:
        """Until stderr has the pattern behind its first ``since`` characters.

        Raises:
            NoEnd: the command ended first, or it took too long.
        """
        if not self.comes(pattern, timeout_s, since):
            state = f"ended with {self.process.returncode}" if self.has_ended() else f"not within {timeout_s:.0f} s"
            raise NoEnd(f"{pattern!r} was never said ({state}): {self.said().strip().splitlines()[-1:]}")

    def comes(self, pattern: str, timeout_s: float, since: int = 0) -> bool:
        """Whether stderr has the pattern before the command ends and the time is over."""
        until_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.said()[since:], re.MULTILINE)) and time.monotonic() < until_s:
            if self.has_ended():
                return re.search(pattern, self.said()[since:], re.MULTILINE) is not None
            time.sleep(_POLL_S)
        return found is not None

    def send(self, number: int) -> None:
        """A signal to its process; none where it has ended."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def finish(self, timeout_s: float = LONG_S) -> Ended:
        """Wait for its end.

        Raises:
            NoEnd: it took too long; its process is ended.
        """
        until_s = time.monotonic() + timeout_s
        while not self.has_ended():
            if time.monotonic() > until_s:
                self.send(signal.SIGKILL)
                raise NoEnd(f"no end within {timeout_s:.0f} s: {self.said().strip().splitlines()[-1:]}")
            time.sleep(_POLL_S)
        out = self._out.read_text(encoding="utf-8", errors="replace")
        return Ended(self.process.returncode, out, self.said(), self._cpu_s)
