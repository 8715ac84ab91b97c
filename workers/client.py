"""The other end of a fork server: starts it, asks it, and ends it with everything that came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence

from .outcome import OUTCOME, Crashed, Lost, Outcome
from .process import end_all_with, end_orphans, start_child, text_of, unnamed_file
from .protocol import receive, send
from .request import TrialRequest
from .scratch import Scratch

FOLDERS = "autotune-"
"""What the names of fork servers' folders begin with."""

_GRACE_S = 120.0
"""How long over a trial's deadline a server may stay silent: it may be importing torch from a slow disk."""
_CLOSE_S = 2.0
"""How long a server may take to end its descendants by itself; it may be importing torch."""
_MARK = "AUTOTUNE_SERVER"
_LOG_CHARACTERS = 4096
_FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""What a process brings upon itself."""


class ForkServer:
    """A running fork server."""

    def __init__(
        self, environment: Mapping[str, str], working_dir: str | None = None, processors: Sequence[int] = ()
    ) -> None:
        """Start a server; it answers once it is up.

        Args:
            environment: all variables that its trials start with.
            working_dir: the folder that its trials start in; None is this process's.
            processors: that its trials run on; empty are all.

        Raises:
            OSError: it cannot be started: no room for its files, no such folder, no more processes.
        """
        self._mark = f"{_MARK}={uuid.uuid4()}"
        self._log = unnamed_file()
        self._scratch = Scratch(FOLDERS)
        self._socket, theirs = socket.socketpair()
        name, _, value = self._mark.partition("=")
        module, handle = f"{__package__}.trial.fork_server", theirs.fileno()
        try:
            with _on(processors):
                self._process: subprocess.Popen[bytes] = start_child(
                    [sys.executable, "-P", "-m", module, str(handle), str(self._scratch.path)],
                    env={**environment, name: value},
                    cwd=working_dir,
                    pass_fds=[handle],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,  # the terminal's Ctrl-C is for the driver
                )
        except OSError:
            self._log.close()
            self._scratch.remove()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The server's pid."""
        return self._process.pid

    def is_up(self) -> bool:
        """Whether the server can be asked again."""
        return self._process.poll() is None

    def run(self, request: TrialRequest) -> Outcome:
        """Run one trial and wait for its outcome: ``Lost`` where the server ended or fell silent, with everything that
        came of it."""
        self._socket.settimeout(request.latest_s + _GRACE_S)
        try:
            send(self._socket, request.model_dump_json(by_alias=True))
            text = receive(self._socket)
        except OSError:
            text = None
        return OUTCOME.validate_json(text) if text is not None else self._without_answer(request)

    def close(self) -> None:
        """End the server and everything that came of it. May be called while another thread waits in :meth:`run`."""
        self._end()
        self._log.close()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        end_all_with(self._mark)  # what a server that was killed could not end itself: its trials, and theirs
        end_orphans()  # and those that have cleared their environment
        self._scratch.remove()

    def _without_answer(self, request: TrialRequest) -> Outcome:
        ended_by_itself = self._has_ended()
        self._end()
        said = "it said nothing"
        with contextlib.suppress(ValueError):  # closed by another thread
            said = text_of(self._log)[-_LOG_CHARACTERS:] or said
        self._log.close()
        code = self._process.returncode
        if code > 0:
            return Lost(message=f"the fork server ended with code {code}: {said}")
        if not ended_by_itself:
            return Lost(message="the fork server fell silent. The machine may have been paused, or be overloaded.")
        name = signal.Signals(-code).name if code else "exit"
        if -code in _FAULTS and any(technique.environment() for technique in request.applied.techniques()):
            return Crashed(message=f"{name} of the fork server, which has the plan's environment: {said}")
        return Lost(message=f"the fork server was killed ({name}). The machine's log (dmesg) may say by whom.")

    def _has_ended(self) -> bool:
        """Whether it has, by now: its end of the socket closes a little sooner."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        return not self.is_up()


@contextlib.contextmanager
def _on(processors: Sequence[int]) -> Iterator[None]:
    """What this thread starts meanwhile runs on these processors, with all that it starts itself."""
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
