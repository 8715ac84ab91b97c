"""The other end of a fork server: starts it, asks it, and ends it with everything that came of it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from ..errors import AutotuneError
from ._base import TrialRequest
from .outcome import OUTCOME, Crashed, Outcome
from .process import end_all_with
from .protocol import receive, send

__all__ = ["ForkServer", "SlotLost"]

_GRACE_S = 120.0
"""How long over a trial's deadline a server may stay silent: it may be importing torch from a slow disk."""
_CLOSE_S = 2.0
"""How long a server may take to end its descendants by itself; it may be importing torch."""
_MARK = "AUTOTUNE_SERVER"
_LOG_BYTES = 4096


class SlotLost(AutotuneError):
    """What runs trials has died, which says nothing of the trial: ask again."""


class ForkServer:
    """A running fork server."""

    def __init__(self, environment: Mapping[str, str], working_dir: str | None = None) -> None:
        """Start a server; it answers once it is up.

        Args:
            environment: all variables that its trials start with.
            working_dir: the folder that its trials start in; None is this process's.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="autotune-"))
        self._mark = f"{_MARK}={uuid.uuid4()}"
        self._socket, theirs = socket.socketpair()
        name, _, value = self._mark.partition("=")
        with theirs, (self._folder / "log").open("wb") as log:
            command = [
                sys.executable,
                "-P",
                "-m",
                f"{__package__}.fork_server",
                str(theirs.fileno()),
                str(self._folder),
            ]
            self._process = subprocess.Popen(
                command,
                env={**environment, name: value},
                cwd=working_dir,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C is for the driver
            )

    @property
    def pid(self) -> int:
        """The server's pid."""
        return self._process.pid

    def is_up(self) -> bool:
        """Whether the server can be asked again."""
        return self._process.poll() is None

    def run(self, request: TrialRequest) -> Outcome:
        """Run one trial and wait for its outcome.

        Raises:
            SlotLost: the server was killed or fell silent; everything that came of it has been ended.
        """
        self._socket.settimeout(request.deadline_s + _GRACE_S)
        try:
            send(self._socket, request.model_dump_json(by_alias=True))
            text = receive(self._socket)
        except OSError:
            text = None
        return OUTCOME.validate_json(text) if text is not None else self._without_answer()

    def close(self) -> None:
        """End the server and everything that came of it. May be called while another thread waits in :meth:`run`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        end_all_with(self._mark)  # what a server that was killed could not end itself: its trials, and theirs
        shutil.rmtree(self._folder, ignore_errors=True)

    def _without_answer(self) -> Outcome:
        log = self._folder / "log"
        try:
            said = log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        except OSError:  # none was written, or close() has just removed it
            said = ""
        self.close()
        if self._process.returncode > 0:
            return Crashed(message=f"the fork server ended with code {self._process.returncode}: {said.strip()}")
        raise SlotLost(f"the fork server (pid {self.pid}) was lost")
