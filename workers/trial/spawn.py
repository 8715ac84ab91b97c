"""Starting a trial: a fork of this process, or a new interpreter, in the same supervised way."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

from ...measure.processes import count_files_of, end_with
from ...training.launched import TRIAL_VARIABLE
from ..process import fork
from ..request import TrialRequest
from .folder import TrialFolder

_FIRST_TO_GO = "1000"


class Child(NamedTuple):
    """A trial that has just been started."""

    pid: int
    output: int
    """Read end of the pipe that its stdout and stderr go to."""


def spawn(folder: TrialFolder, request: TrialRequest, fresh: bool, close: int) -> Child:
    """Start a trial that answers the request in ``folder``.

    Args:
        folder: the trial's files.
        request: what is in it.
        fresh: start a new interpreter instead of going on in a fork of this one.
        close: a file descriptor that the trial must not have.
    """
    spawned_s = time.monotonic()
    server = os.getpid()
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid == 0:
        try:
            os.close(close)
            os.close(read_end)
            _become_trial(server, write_end)
            _run(folder, request, fresh, spawned_s)
        finally:
            os._exit(1)
    os.close(write_end)
    return Child(pid, read_end)


def _become_trial(server: int, output: int) -> None:
    """In the child: a session of its own, no terminal, output to the pipe, and an end when the server ends."""
    os.setsid()
    end_with(server)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)


def _run(folder: TrialFolder, request: TrialRequest, fresh: bool, spawned_s: float) -> NoReturn:
    if request.command is not None:
        os.environ[TRIAL_VARIABLE] = str(folder.path)
        os.execvp(request.command[0], request.command)
    if fresh:
        folder.answer_anew(spawned_s)
    from .child import run_trial

    count_files_of(os.getppid())
    run_trial(folder, spawned_s)
