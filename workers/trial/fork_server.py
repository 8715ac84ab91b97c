"""The fork server: one small single-threaded process per environment, from which trials start in milliseconds.

It has imported torch and nothing that starts threads or touches a device. It collects its trials' orphans, and when its
client goes it ends every descendant and itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

from ..outcome import Lost, Outcome
from ..process import become_subreaper
from ..protocol import receive, send
from ..request import REQUEST, MeasureRequest, TrialRequest
from .folder import FolderLost, TrialFolder, check_working_folder
from .spawn import spawn
from .supervise import Limits, end_descendants, supervise
from .verdict import verdict

# torch._dynamo: the first AdamW of a process imports it, for a second.
_PRELOADED = ("torch", "torch._dynamo", "torch.utils.checkpoint", "torch.utils.data", "autotune.workers.trial.child")


class _Server:
    """Answers trial requests, one at a time, until the client goes."""

    def __init__(self, client: socket.socket, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._may_fork = become_subreaper() and hasattr(os, "pidfd_open")
        self._num_trials = 0
        self._is_warm = False

    def serve(self) -> None:
        """One request after another."""
        while (text := receive(self._client)) is not None:
            outcome = self._run(REQUEST.validate_json(text))
            if outcome is None:
                return
            send(self._client, outcome.model_dump_json(by_alias=True))

    def _run(self, request: TrialRequest) -> Outcome | None:
        """The outcome; None when the client has gone meanwhile."""
        self._num_trials += 1
        folder = TrialFolder(self._folder / f"trial-{self._num_trials}")
        lost = check_working_folder()
        if lost is not None:
            return lost
        try:
            folder.make()
            folder.write_request(request)
            return self._supervised(request, folder)
        except FolderLost as reason:
            return Lost(message=str(reason))
        except OSError as reason:
            end_descendants()
            return Lost(message=f"a trial's process cannot be started: {reason.strerror or reason}.")
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)

    def _supervised(self, request: TrialRequest, folder: TrialFolder) -> Outcome | None:
        fresh = request.fresh or request.command is not None or not self._may_fork
        if not fresh:
            self._warm_up()
        child = spawn(folder, request, fresh, self._client.fileno())
        takes_turns = isinstance(request, MeasureRequest) and request.options.turns is not None
        limits = Limits(
            request.deadline_s,
            request.memory_limit_bytes,
            is_lifted=folder.is_measured,
            speaker=folder.read_speaker,
            compiled_s=folder.read_compiled_s,
            most_compiling_s=request.compiling_s,
            takes_turns=takes_turns,
        )
        ending = supervise(child, limits, self._client)
        return verdict(request, folder, ending) if ending is not None else None

    def _warm_up(self) -> None:
        """Import what every trial needs, once, and only where a trial will be forked."""
        if not self._is_warm:
            for module in _PRELOADED:
                importlib.import_module(module)
            gc.collect()
            gc.freeze()  # a trial's collections leave these pages alone, so they stay shared
            self._is_warm = True


def main(client: int, folder: Path) -> None:
    """Serve the client at the other end of an inherited socket.

    Args:
        client: the socket's file descriptor.
        folder: a folder of this server's own, removed once the client has gone.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would take exit statuses away
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a Ray worker blocks SIGINT, and what it starts inherits that
    with socket.socket(fileno=client) as connection:
        try:
            with contextlib.suppress(ConnectionError):  # the client went before its answer came
                _Server(connection, folder).serve()
        finally:
            end_descendants()
    shutil.rmtree(folder, ignore_errors=True)  # but after an exception the client reads our log there


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
