"""Trials on this machine, from this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Literal

from ..errors import UserError
from .client import ForkServer
from .devices import visible_gpus
from .outcome import Failed, Lost, Outcome
from .pool import SlotPool
from .request import TrialRequest
from .trial.environment import trial_environment

__all__ = ["LocalExecutor", "LocalSlot"]


class LocalExecutor(SlotPool):
    """Runs each trial in a process of its own on this machine; one slot for the CPU, or one for each GPU."""

    def __init__(self, device: Literal["cpu", "cuda"] = "cpu", num_slots: int | None = None) -> None:
        """Start nothing yet.

        Args:
            device: torch's device type.
            num_slots: trials at once; None is one for the CPU, or one for each visible GPU.

        Raises:
            UserError: no such device, or fewer than ``num_slots`` GPUs.
        """
        if device == "cpu":
            extras: list[dict[str, str]] = [{} for _ in range(num_slots or 1)]
        else:
            gpus = visible_gpus()
            if not gpus or (num_slots or 0) > len(gpus):
                raise UserError(f"{num_slots or 1} CUDA device(s) were wanted, but {len(gpus)} are visible here.")
            extras = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:num_slots]]
        super().__init__([LocalSlot({**os.environ, **extra}) for extra in extras])


class LocalSlot:
    """Fork servers by environment, one trial at a time."""

    def __init__(self, base: Mapping[str, str], working_dir: str | None = None) -> None:
        """Start nothing yet.

        Args:
            base: variables that trials start with, besides those of the request and its plan.
            working_dir: the folder that trials start in; None is this process's.
        """
        self._base = base
        self._working_dir = working_dir
        self._servers: dict[frozenset[tuple[str, str]], ForkServer] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, request: TrialRequest) -> Outcome:
        """Run a trial on the server of its environment: ``Lost`` where there cannot be one, or the slot is closed."""
        try:
            environment = trial_environment(request, self._base)
        except UserError as error:
            return Failed(message=str(error))
        key = frozenset(environment.items())
        try:
            server = self._server(key)
        except OSError as reason:
            return Lost(message=_why_none(reason))
        if server is None:
            return Lost(message="the slot is closed")
        try:
            return server.run(request)
        finally:
            if not server.is_up():
                self._servers.pop(key, None)

    def close(self) -> None:
        """End every server with everything that came of it."""
        with self._lock:
            self._is_closed = True
        for server in list(self._servers.values()):
            server.close()

    def _server(self, key: frozenset[tuple[str, str]]) -> ForkServer | None:
        with self._lock:
            if self._is_closed:
                return None
            if key not in self._servers:
                self._servers[key] = ForkServer(dict(key), self._working_dir)
            return self._servers[key]


def _why_none(reason: OSError) -> str:
    where = f"{reason.filename}: " if reason.filename else ""
    said = f"{where}a fork server cannot be started: {reason.strerror or reason}."
    return f"{said} Make room there, or name another folder with TMPDIR."
