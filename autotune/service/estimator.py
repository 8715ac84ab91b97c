"""Estimates of an archive's job: its code runs as a driver's does, in a process of its own, never in the server."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import threading
from contextlib import suppress

from ..estimates.types import Estimate
from ..workers.process import identify
from .archives import unpack
from .driver import driver_environment, end_leftovers
from .predictions import read_estimate
from .problems import Problem
from .supervisor import Places, RunnerOptions

_LONGEST_S = 300.0
"""An estimate that takes longer is ended."""
_MOST_BYTES = 4 * 2**20
"""Of its document."""


class Estimator:
    """One estimate at a time."""

    def __init__(self, places: Places, options: RunnerOptions) -> None:
        """
        Args:
            places: the state folder, where the job's files are laid out meanwhile.
            options: how drivers are run, which its process is one of.
        """
        self._places, self._options = places, options
        self._one = threading.Lock()

    def estimate(self, archive: str, task: str, cards: str) -> tuple[str, dict[str, Estimate]]:
        """A job's fingerprint, and its estimate on each card.

        Args:
            archive: SHA-256 of one that is kept.
            task: ``model.py`` or ``model.py:name`` in it.
            cards: names, with commas between them.

        Raises:
            Problem: 403, tasks are to be other users' processes here; 422, the job cannot be estimated, in its words;
                503, another one is being estimated.
        """
        if self._options.run_as is not None:
            raise Problem(
                403,
                "tasks are other users' processes here (--run-as), which end with their search: submit a search, and "
                "ask by its plan's fingerprint; or run `autotune estimate --card` yourself.",
            )
        if not self._one.acquire(blocking=False):
            raise Problem(503, "another job is being estimated. Ask again in a moment.")
        try:
            return self._run(archive, task, cards)
        finally:
            self._one.release()

    def _run(self, archive: str, task: str, cards: str) -> tuple[str, dict[str, Estimate]]:
        name = secrets.token_hex(8)
        folder = self._places.search(name)
        try:
            unpack(self._places.archives / archive, folder.work, self._places.limits)
            command = [*self._options.program, "estimate", "--json", f"--card={cards}", task]
            result, log = folder.begin_output()
            with result, log:
                process = subprocess.Popen(
                    command,
                    cwd=folder.work,
                    env=driver_environment(os.environ, self._options.pass_env, name, 1),
                    stdin=subprocess.DEVNULL,
                    stdout=result,
                    stderr=log,
                    start_new_session=True,
                )
            driver = identify(process.pid)
            try:
                code: int | None = process.wait(_LONGEST_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                end_leftovers(name, 1, driver)
                process.wait()
            if code is None:
                raise Problem(422, f"the job was still being estimated after {_LONGEST_S:.0f} s.")
            if code not in (0, 3):  # 3: it fits no card, which is an answer
                said = folder.read_error()[0] or (folder.read_log().strip().splitlines() or ["it said nothing."])[-1]
                raise Problem(422, f"the job cannot be estimated: {said}")
            try:
                return read_estimate(folder.result.read_bytes()[:_MOST_BYTES])
            except (OSError, ValueError):
                raise Problem(422, "the job's process left no estimate that can be read.") from None
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)
