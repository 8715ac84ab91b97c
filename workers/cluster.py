"""Trials on a Ray cluster. Ray lives in a process of its own, so that what happens to it does not happen to this one.

Ray's own code takes over signals, prints what it likes, waits a minute for a cluster that has died, and then ends the
process that it is in.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ..errors import TrialsLost, UnlikeDevices, UserError
from ..measure.processes import children
from ..task_file import split_source
from ._base import Executor
from .client import FOLDERS
from .outcome import STOPPED, Failed, Lost, Outcome
from .pool import done
from .process import (
    ProcessId,
    end_all_with,
    end_orphans,
    identify,
    is_alive,
    name_of,
    name_of_ended,
    start_child,
    text_of,
    unnamed_file,
)
from .protocol import receive, send
from .request import TrialRequest
from .scratch import Scratch, remove_abandoned

_MARK = "AUTOTUNE_CLUSTER"
_CORE = ("raylet", "gcs_server")
"""Without these processes there is no cluster; workers come and go."""
_LOOK_S = 2.0
"""How often to look whether the cluster still lives; it is to outlive a loss by as much before that is told."""
_RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RAYS_PATIENCE_S = float(os.environ.get(_RAYS_PATIENCE, "60"))
"""How long Ray's processes wait for the cluster's control process (GCS), which may be started again; then they end."""
_MOST_SILENT = max(1, int(_RAYS_PATIENCE_S * 2 / 3 / _LOOK_S))
"""Looks in a row at which a joined cluster does not answer: it is said before Ray ends the process that it is in."""
_CLOSE_S = 30.0
"""How long a cluster may take to end."""
_SHORT_FOLDER = "/tmp" if os.access("/tmp", os.W_OK) else None
"""Ray's sockets lie in its folder, and their names must be short."""
_CONFIG = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns of actors without a GPU
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill an actor for what its trial may use
}
"""What the processes of a cluster that is started here read from their environment."""
WORKER_CONFIG = {
    "RAY_kill_child_processes_on_worker_exit": "false",  # fork servers end their trials and then themselves
    "RAY_worker_niceness": "0",  # it is 15, and trials would inherit it: a job runs at 0
}
"""What a worker reads."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterOptions(_Frozen):
    """What the process that Ray lives in is told first."""

    device: Literal["cpu", "cuda"]
    device_name: str | None
    gpus_per_trial: int | None
    address: str | None
    working_dir: str | None
    in_turns: bool
    """Other searches take turns with this one, which asks for devices only while it has something to run."""
    folder: str
    environment: dict[str, str]
    """Of this process: what a job that is started here would have."""


class Waiting(_Frozen):
    """Others use all the devices."""

    num_slots: int
    device_type: str


class Ready(_Frozen):
    """Its first answer: a cluster."""

    num_slots: int
    address: str
    """Where its control process (GCS) listens."""
    device_type: str


class Changed(_Frozen):
    """Devices have come or gone."""

    num_slots: int


class Ask(_Frozen):
    """A request with a number."""

    number: int
    request: TrialRequest


class Share(_Frozen):
    """Whether other searches wait for devices: they get those that stand idle."""

    others_wait: bool


class Refused(_Frozen):
    """Its first answer: why there is no cluster, or none that is meant."""

    reason: str
    is_lost: bool
    """It does not answer, or did not come up: nothing that the user asked for is at fault."""
    types: tuple[str, ...] = ()
    """Those that were meant, where one was wanted."""


class Answer(_Frozen):
    """What came of a number."""

    number: int
    outcome: Outcome


_FIRST: TypeAdapter[Ready | Refused | Waiting] = TypeAdapter(Ready | Refused | Waiting)
_LATER: TypeAdapter[Answer | Changed | Waiting] = TypeAdapter(Answer | Changed | Waiting)
ASKED: TypeAdapter[Ask | Share] = TypeAdapter(Ask | Share)
"""What it is told later."""


@cache
def kind_of_devices(address: str) -> Literal["cpu", "cuda"]:
    """``cuda`` where a Ray cluster has a GPU at the moment, as a process of its own reads it.

    Raises:
        TrialsLost: the cluster does not answer.
    """
    program = f"from {__package__}.ray_pool import tell_kind; tell_kind({address!r})"
    asked = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    kinds: dict[str, Literal["cpu", "cuda"]] = {"cpu": "cpu", "cuda": "cuda"}
    said = (asked.stdout or asked.stderr).splitlines()[-1]
    if said not in kinds:
        raise TrialsLost(f"the Ray cluster at {address} could not be asked for its devices: {said}")
    return kinds[said]


class RayExecutor(Executor):
    """Runs each trial under a Ray actor, which has a device to itself: a GPU, or a machine for the CPU. What joins the
    cluster later is used, too."""

    def __init__(
        self,
        device: Literal["cpu", "cuda"] = "cpu",
        device_name: str | None = None,
        address: str | None = None,
        working_dir: Path | None = None,
        tell: Callable[[str], None] = lambda words: None,
        gpus_per_trial: int | None = 1,
        in_turns: bool = False,
    ) -> None:
        """Start an isolated cluster on this machine, or join one.

        Args:
            device: torch's device type.
            device_name: part of a device's name and memory, where there are unlike ones.
            address: a cluster's; None starts one, which ends with this executor.
            working_dir: the folder that is shipped to the cluster at ``address``; tasks lie in it.
            tell: is told what is waited for.
            gpus_per_trial: one for each of its processes, on one machine; None is all that a machine has.
            in_turns: of a cluster that is joined, a device is held only while a trial runs there, or nobody else waits
                (:meth:`share`); none is waited for before.

        Raises:
            UserError: Ray is not installed, or the cluster lacks the device.
            UnlikeDevices: several unlike ones are meant.
            TrialsLost: there is no cluster at ``address``, or none can be started here.
        """
        if importlib.util.find_spec("ray") is None:
            raise UserError("--executor ray needs Ray: `pip install ray`, or use --executor local.")
        self._where = f"the Ray cluster at {address}" if address else "the Ray cluster on this machine"
        self._joined, self._tell = address is not None, tell
        self._shipped = working_dir.resolve() if address and working_dir else None
        self._asked: dict[int, Future[Outcome]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: TrialsLost | None = None
        try:
            self._scratch = Scratch("autotune-ray-", _SHORT_FOLDER)
        except OSError as reason:
            raise TrialsLost(f"{reason.filename}: Ray needs a folder: {reason.strerror}. Make room there.") from None
        with contextlib.ExitStack() as undone:
            undone.callback(self._end, 0.0)
            self._start()
            shipped = str(self._shipped) if self._shipped else None
            options = ClusterOptions(
                device=device,
                device_name=device_name,
                gpus_per_trial=gpus_per_trial,
                address=address,
                working_dir=shipped,
                in_turns=in_turns,
                folder=str(self._scratch.path),
                environment=dict(os.environ),
            )
            ready = self._first_answer(options)
            undone.pop_all()
        self.num_slots, self.address, self.device_type = ready.num_slots, ready.address, ready.device_type
        self._is_watched = address is not None and self._answers()
        self._listener = threading.Thread(target=self._listen, name="autotune-ray", daemon=True)
        self._listener.start()

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request; its task is looked for in the folder that was shipped."""
        if self._shipped is not None:
            path, name = split_source(request.task)
            try:
                shipped = str(path.resolve().relative_to(self._shipped))
            except ValueError:
                return done(
                    Failed(message=f"{path}: not in {self._shipped}, the folder that is shipped to the cluster.")
                )
            request = request.of_task(f"{shipped}:{name}" if name else shipped)
        with self._lock:
            number, future = next(self._numbers), Future[Outcome]()
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            if self._is_closed:
                return done(STOPPED)
            self._asked[number] = future
            with contextlib.suppress(OSError):  # the listener sees it, too
                send(self._socket, Ask(number=number, request=request).model_dump_json(by_alias=True))
        return future

    def share(self, others_wait: bool) -> None:
        """Tell the slots whether other searches wait for devices."""
        with self._lock, contextlib.suppress(OSError):  # the listener sees it, too
            send(self._socket, Share(others_wait=others_wait).model_dump_json())

    def close(self) -> None:
        """End every actor with everything that came of it, and the cluster where it was started here."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._end(0.0 if self._failure else _CLOSE_S)

    def _start(self) -> None:
        mark = str(uuid.uuid4())
        self._mark, self._log = f"{_MARK}={mark}", unnamed_file()
        self._socket, theirs = socket.socketpair()
        with theirs:
            config = {**WORKER_CONFIG, **({} if self._joined else _CONFIG)}
            self._process: subprocess.Popen[bytes] = start_child(
                [sys.executable, "-P", "-c", f"from {__package__}.ray_pool import main; main({theirs.fileno()})"],
                env={**os.environ, **config, _MARK: mark},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # the terminal's Ctrl-C is for the driver
            )

    def _first_answer(self, options: ClusterOptions) -> Ready:
        with contextlib.suppress(OSError):
            send(self._socket, options.model_dump_json())
        self._core: dict[str, ProcessId] = {}
        answer = self._next_answer()
        if isinstance(answer, Waiting):
            self._tell_of(answer)
            answer = self._next_answer()
        assert not isinstance(answer, Waiting), "it is said once"
        if isinstance(answer, Refused):
            if answer.types:
                raise UnlikeDevices(answer.reason, answer.types)
            raise (TrialsLost if answer.is_lost else UserError)(answer.reason)
        self._find_core()
        return answer

    def _tell_of(self, waiting: Waiting) -> None:
        self._tell(
            f"{self._where}: all of {waiting.num_slots} x {waiting.device_type} are in use by other work. Waiting for "
            "one; Ctrl-C ends that."
        )

    def _next_answer(self) -> Ready | Refused | Waiting:
        while not self._has_answer(_LOOK_S):
            self._find_core()
            ended = map(name_of_ended, children(self._process.pid))  # it may never have been seen alive
            if not self._lives() or any(name in _CORE for name in ended):
                raise TrialsLost(f"{self._where} died while it was started. Or use --executor local.")
        text = receive(self._socket)
        if text is None:
            said = (text_of(self._log).splitlines() or ["it ended and said nothing"])[-1]
            raise TrialsLost(f"{self._where} could not be reached: {said} Or use --executor local.")
        return _FIRST.validate_json(text)

    def _find_core(self) -> None:
        """Children alone, and the first of a name: what the raylet forks has its name, too, until it runs another
        program, and may end."""
        for process in filter(None, map(identify, children(self._process.pid))):
            if (name := name_of(process)) in _CORE:
                self._core.setdefault(name, process)

    def _has_answer(self, within_s: float) -> bool:
        return within_s > 0 and bool(select.select([self._socket], [], [], within_s)[0])

    def _listen(self) -> None:
        """In a thread: hand out outcomes until the other side goes, or the cluster does. What the other side says of a
        cluster that dies may come first: a loss waits until it is known that the cluster lives."""
        look_at, num_silent, reason = 0.0, 0, ""
        losses: deque[tuple[float, Answer]] = deque()
        while not reason:
            if self._has_answer(look_at - time.monotonic()):
                text = receive(self._socket)
                if text is None:
                    reason = "was lost" if self._lives() and not num_silent else "has died"
                    continue
                answer = _LATER.validate_json(text)
                if isinstance(answer, Changed):
                    self.num_slots = max(answer.num_slots, 1)  # without any, a trial says so
                elif isinstance(answer, Waiting):
                    self._tell_of(answer)
                elif isinstance(answer.outcome, Lost):
                    losses.append((time.monotonic() + _LOOK_S, answer))
                else:
                    self._hand_out(answer)
                continue
            look_at = time.monotonic() + _LOOK_S
            num_silent = num_silent + 1 if self._is_watched and not self._answers() else 0
            if not self._lives() or num_silent >= _MOST_SILENT:
                reason = "has died"
            elif not num_silent:
                while losses and losses[0][0] < time.monotonic():
                    self._hand_out(losses.popleft()[1])
        with self._lock:
            if not self._is_closed:
                self._failure = TrialsLost(f"{self._where} {reason}.")
        for future in self._asked.values():  # nothing is added any more; who hears of one may ask again at once
            if self._failure is not None:
                future.set_exception(self._failure)
            else:
                future.set_result(STOPPED)

    def _hand_out(self, answer: Answer) -> None:
        self._asked.pop(answer.number).set_result(answer.outcome)

    def _lives(self) -> bool:
        """Whether all the processes do without which there is no cluster, as far as they are this machine's."""
        return all(map(is_alive, self._core.values()))

    def _answers(self) -> bool:
        """Whether the cluster's control process does, which a client of Ray's may not be able to see at all."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_LOOK_S).close()
        except OSError:
            return False
        return True

    def _end(self, patience_s: float) -> None:
        with contextlib.suppress(AttributeError):  # it was not started
            self._socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
            self._process.kill()
            self._process.wait()
            end_all_with(self._mark)
            self._log.close()
        end_orphans()
        self._scratch.remove()
        remove_abandoned(FOLDERS)  # of fork servers that were killed with their actor
