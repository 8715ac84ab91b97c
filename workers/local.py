"""Trials on this machine, from this process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from ..errors import UserError
from .client import FOLDERS, ForkServer
from .devices import fault_of
from .outcome import Crashed, Failed, Lost, Measured, Outcome, TimedOut
from .placement import slots_here
from .pool import SlotPool
from .request import CompareRequest, PredictRequest, TrialRequest
from .trial.environment import trial_environment
from .turns import take_turns

_LOOK_S = 0.1
_YIELD_S = 0.25
"""For which a device is left to those that wait, who look every tenth of a second."""
_PEER = "3i"
"""``struct ucred``: process, user, group. Source: unix(7), SO_PEERCRED"""
_Key = tuple[int, frozenset[tuple[str, str]]]
"""Of a fork server: its lane, and its environment."""


class LocalExecutor(SlotPool["LocalSlot"]):
    """Runs each trial in a process of its own on this machine; one slot for the CPU, or one for each GPU or
    so many of them as a trial takes."""

    def __init__(
        self, device: Literal["cpu", "cuda"] = "cpu", device_name: str | None = None, gpus_per_trial: int | None = 1
    ) -> None:
        """Start nothing yet.

        Args:
            device: torch's device type.
            device_name: part of a device's name and memory, where there are unlike ones.
            gpus_per_trial: one for each of its processes; None is all that there are.

        Raises:
            UserError: no such device.
            UnlikeDevices: several are meant.
        """
        self.device_type, found = slots_here(device, device_name, gpus_per_trial)
        slots = [
            LocalSlot({**os.environ, **place.environment}, name=name, processors=place.processors)
            for name, place in found.items()
        ]
        super().__init__(slots, is_used=lambda slot: is_any_held(slot.environment))


class LocalSlot:
    """Fork servers by environment, one trial at a time; a second lane for the other of two that take turns."""

    def __init__(
        self, base: Mapping[str, str], working_dir: str | None = None, name: str = "", processors: Sequence[int] = ()
    ) -> None:
        """Start nothing yet.

        Args:
            base: variables that trials start with, besides those of the request and its plan.
            working_dir: the folder that trials start in; None is this process's.
            name: of its device.
            processors: that its trials run on; empty are all.
        """
        self.name = name
        self.environment = base
        self._working_dir, self._processors = working_dir, processors
        self._servers: dict[_Key, ForkServer] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, request: TrialRequest) -> Outcome:
        """Run a trial on the server of its environment, or two that take turns, each on one of its own: ``Lost`` where
        there cannot be one, or the slot is closed."""
        with contextlib.ExitStack() as stack:
            is_traced = isinstance(request, PredictRequest) and request.command is None
            is_alone = request.device == "cuda" and not is_traced
            gpus = _gpus(self.environment) if is_alone else []
            held = [stack.enter_context(alone_on(gpu, lambda: self._is_closed)) for gpu in gpus]
            outcome = self._run_here(request)
        waited_for = next((process for process in held if process is not None), None)
        if waited_for is None or not isinstance(outcome, Measured):
            return outcome
        said = f"process {waited_for}, another search, uses the same GPU: its trials and these wait for each other"
        measurement = outcome.measurement
        measurement = measurement.model_copy(update={"warnings": (*measurement.warnings, said)})
        return outcome.model_copy(update={"measurement": measurement})

    def _run_here(self, request: TrialRequest) -> Outcome:
        if isinstance(request, CompareRequest):
            return take_turns(request, self._run, FOLDERS)
        return self._run(request)

    def _run(self, request: TrialRequest, lane: int = 0) -> Outcome:
        try:
            environment = trial_environment(request, self.environment)
        except UserError as error:
            return Failed(message=str(error))
        key = (lane, frozenset(environment.items()))
        try:
            server = self._server(key)
        except OSError as reason:
            return Lost(message=_why_none(reason))
        if server is None:
            return Lost(message="the slot is closed")
        try:
            return self._of_card(request, server.run(request))
        finally:
            if not server.is_up():
                self._servers.pop(key, None)

    def _of_card(self, request: TrialRequest, outcome: Outcome) -> Outcome:
        """A trial that failed on a card that has failed, too, says nothing of its configuration."""
        gpu = self.environment.get("CUDA_VISIBLE_DEVICES")
        if request.device != "cuda" or not gpu or not isinstance(outcome, Crashed | Failed | TimedOut):
            return outcome
        fault = fault_of(gpu)
        return outcome if fault is None else Lost(message=f"{fault} A trial's last words: {outcome.message}")

    def close(self) -> None:
        """End every server with everything that came of it."""
        with self._lock:
            self._is_closed = True
        for server in list(self._servers.values()):
            server.close()

    def _server(self, key: _Key) -> ForkServer | None:
        with self._lock:
            if self._is_closed:
                return None
            if key not in self._servers:
                self._servers[key] = ForkServer(dict(key[1]), self._working_dir, self._processors)
            return self._servers[key]


def _why_none(reason: OSError) -> str:
    where = f"{reason.filename}: " if reason.filename else ""
    said = f"{where}a fork server cannot be started: {reason.strerror or reason}."
    return f"{said} Make room there, or name another folder with TMPDIR."


@contextlib.contextmanager
def alone_on(device: str, is_over: Callable[[], bool]) -> Iterator[int | None]:
    """Hold a device within the block, once no other process does: of two searches on one, each would measure the other.
    Who has waited meanwhile is next.

    A name that the system gives to one socket at a time (unix(7), abstract addresses) ends with its process, and needs
    no file that one user makes and another may not open. Where there are none such, nothing is held.

    Args:
        device: a GPU's UUID.
        is_over: asked while another holds it; True ends the wait, and holds nothing.

    Yields:
        The process that was waited for, 0 where it is not known; None where none was.
    """
    waited_for: int | None = None
    with socket.socket(socket.AF_UNIX) as own:
        while not _holds(own, device) and not is_over():
            waited_for = _holder(device)
            time.sleep(_LOOK_S)
        yield waited_for
        own.setblocking(False)
        with contextlib.suppress(OSError):
            own.accept()[0].close()  # somebody has looked who holds it
            own.close()
            time.sleep(_YIELD_S)


def is_any_held(environment: Mapping[str, str]) -> bool:
    """Whether a process's trial has one of the GPUs that trials with this environment use."""
    for gpu in _gpus(environment):
        with socket.socket(socket.AF_UNIX) as own:
            if not _holds(own, gpu):
                return True
    return False


def _gpus(environment: Mapping[str, str]) -> list[str]:
    return sorted(filter(None, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")))


def _holds(own: socket.socket, device: str) -> bool:
    try:
        own.bind(_address(device))
        own.listen()
    except OSError as reason:
        return reason.errno != errno.EADDRINUSE
    return True


def _holder(device: str) -> int:
    with socket.socket(socket.AF_UNIX) as other, contextlib.suppress(OSError, AttributeError):
        other.settimeout(_LOOK_S)
        other.connect(_address(device))
        found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_PEER))
        return int(struct.unpack(_PEER, found)[0])
    return 0


def _address(device: str) -> str:
    return f"\0autotune {device}"
