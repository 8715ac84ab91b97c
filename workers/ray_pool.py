"""Trials on a Ray cluster: one actor per device, each with fork servers of its own. The only importer of ray."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..errors import UserError
from ..measure.processes import descendants
from ..task import split_source
from ._base import TrialRequest
from .client import SlotLost
from .environment import THREAD_VARIABLES
from .local import LocalSlot
from .outcome import OUTCOME, Crashed, Failed, Outcome
from .pool import SlotPool, done
from .process import ProcessId, identify, is_alive, name_of
from .reaper import Reaper

__all__ = ["RayExecutor"]

_GRACE_S = 300.0
"""How long over a trial's deadline an actor may stay silent: it may have to be started on another machine."""
_CLOSE_S = 30.0
_CORE = ("raylet", "gcs_server")
"""Without these processes there is no cluster; workers come and go."""
_LOOK_S = 2.0
"""How often to look whether the cluster still lives."""
_OBJECT_STORE_BYTES = 100 * 2**20
"""Only requests and outcomes cross Ray."""
_SHORT_FOLDER = "/tmp" if os.access("/tmp", os.W_OK) else None
_NOT_SHIPPED = [".git", ".venv", ".autotune", "__pycache__"]
_CONFIG = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns of actors without a GPU
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill an actor for what its trial may use
}
"""What the processes of a cluster that is started here read from their environment."""
_WORKER_CONFIG = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""What a worker reads: its fork servers are not killed with it, since they end their trials and then themselves."""
_FORCED_BY_RAY = frozenset({*THREAD_VARIABLES, "PYTHONBREAKPOINT", "PYTHONUNBUFFERED"})
"""Variables that a Ray worker has and a job would not."""


class RayExecutor(SlotPool):
    """Runs each trial under a Ray actor, which has a device to itself."""

    def __init__(
        self,
        device: Literal["cpu", "cuda"] = "cpu",
        num_slots: int | None = None,
        address: str | None = None,
        working_dir: Path | None = None,
    ) -> None:
        """Start an isolated cluster on this machine, or join one.

        Args:
            device: torch's device type.
            num_slots: trials at once; None is one per GPU of the cluster, or one per machine for the CPU.
            address: a cluster's; None starts one, which ends with this executor, or with the thread that calls this.
                A cluster that this process is connected to already is used as it is.
            working_dir: the folder that is shipped to the cluster at ``address``; tasks lie in it.

        Raises:
            UserError: no cluster at ``address``, or one without the device.
        """
        self._connected_here = not ray.is_initialized()
        self._shipped = working_dir.resolve() if address and working_dir else None
        self._reaper = None
        cluster: list[ProcessId] = []
        if self._connected_here:
            others = set(descendants(os.getpid()))
            folder = None if address else tempfile.mkdtemp(prefix="autotune-ray-", dir=_SHORT_FOLDER)
            _connect(address, self._shipped, folder)
            started = [identify(pid) for pid in descendants(os.getpid()) if pid not in others]
            cluster = [process for process in started if process is not None]
            self._reaper = Reaper(cluster, folder)
        # On this machine a trial sees what a job started here would; elsewhere, what Ray's worker has less Ray's part.
        base = None if address else dict(os.environ)
        try:
            placements = _placements(device, num_slots, reserve=address is not None)
            core = [process for process in cluster if name_of(process) in _CORE]
            super().__init__([_RaySlot(options, base, core) for options in placements])
        except UserError:
            self._disconnect()
            raise

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        """Queue a request; its task is looked for in the shipped folder."""
        if self._shipped is None:
            return super().submit(request)
        path, name = split_source(request.task)
        try:
            shipped = str(path.resolve().relative_to(self._shipped))
        except ValueError:
            return done(Failed(message=f"{path}: not in {self._shipped}, the folder that is shipped to the cluster."))
        task = f"{shipped}:{name}" if name else shipped
        return super().submit(request.model_copy(update={"task": task}))

    def close(self) -> None:
        """End every actor with everything that came of it, and the cluster where it was started here."""
        super().close()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connected_here:
            ray.shutdown()
        if self._reaper is not None:
            self._reaper.close()


class _TrialActor:
    """Lives in a Ray worker; its fork servers and their trials are that worker's descendants."""

    def __init__(self, base: Mapping[str, str] | None) -> None:
        mine = os.environ
        if base is None:
            base = {name: value for name, value in mine.items() if name not in _FORCED_BY_RAY}
        gpus = {name: mine[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in mine}
        self._slot = LocalSlot({**base, **gpus})

    def run(self, request: str) -> str:
        """JSON in, JSON out: objects would tie the driver's version to the worker's."""
        return self._slot.run(TrialRequest.model_validate_json(request)).model_dump_json(by_alias=True)

    def close(self) -> None:
        """End the slot's processes."""
        self._slot.close()


class _RaySlot:
    """One actor, started when it is needed, and again after it was lost."""

    def __init__(
        self, options: Mapping[str, Any], base: Mapping[str, str] | None, cluster: Sequence[ProcessId]
    ) -> None:
        self._options = options
        self._base = base
        self._cluster = cluster
        self._actor: Any = None
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, request: TrialRequest) -> Outcome:
        """Run a trial under this slot's actor.

        Raises:
            SlotLost: the actor, its worker, its machine or its fork server was lost, or the slot is closed.
        """
        try:
            reference = self._living_actor().run.remote(request.model_dump_json(by_alias=True))
            return OUTCOME.validate_json(self._wait_for(reference, request.deadline_s + _GRACE_S))
        except RayError as error:
            self._kill()
            said = str(error).strip().splitlines()[-1]
            if _is_deterministic(error):
                return Crashed(message=f"Ray could not run it: {said}")
            raise SlotLost(said) from None

    def close(self) -> None:
        """End the actor with everything that came of it."""
        with self._lock:
            self._is_closed = True
        if self._actor is not None:
            with contextlib.suppress(RayError):  # it has died already
                ray.get(self._actor.close.remote(), timeout=_CLOSE_S)
            self._kill()

    def _wait_for(self, reference: Any, limit_s: float) -> str:
        """An answer, unless the cluster that was started here dies: Ray itself would wait for it.

        Raises:
            UserError: it died.
        """
        ends_s = time.monotonic() + limit_s
        while not ray.wait([reference], timeout=_LOOK_S)[0] and time.monotonic() < ends_s:
            if not all(map(is_alive, self._cluster)):
                raise UserError("the Ray cluster on this machine has died. Every trial that ended is kept: --resume.")
        answer: str = ray.get(reference, timeout=1.0)
        return answer

    def _living_actor(self) -> Any:
        with self._lock:
            if self._is_closed:
                raise SlotLost("the slot is closed")
            if self._actor is None:
                self._actor = ray.remote(_TrialActor).options(**self._options).remote(self._base)
            return self._actor

    def _kill(self) -> None:
        with self._lock:
            actor, self._actor = self._actor, None
            if actor is not None:
                ray.kill(actor)


def _is_deterministic(error: RayError) -> bool:
    """Whether another try would fail alike: the environment cannot be set up, or our own code raised."""
    if isinstance(error, RayTaskError):
        return not isinstance(error.cause, SlotLost)
    return isinstance(error, RuntimeEnvSetupError) or (isinstance(error, RayActorError) and error.actor_init_failed)


def _connect(address: str | None, working_dir: Path | None, folder: str | None) -> None:
    """Quietly: no dashboard, no logs of workers on the terminal.

    Raises:
        UserError: no cluster answers at the address.
    """
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        shipped = {"working_dir": str(working_dir), "excludes": _NOT_SHIPPED} if working_dir else {}
        options["runtime_env"] = {**shipped, "env_vars": _WORKER_CONFIG}
    else:
        os.environ.update({**_CONFIG, **_WORKER_CONFIG})
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        options |= {"_temp_dir": folder}
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
        raise UserError(f"{where} could not be reached: {error}. Or use --executor local.") from None


def _placements(device: Literal["cpu", "cuda"], num_slots: int | None, reserve: bool) -> list[dict[str, Any]]:
    """Ray options of each slot's actor: a GPU, or a machine, with its processors where others may want them.

    Raises:
        UserError: the cluster has fewer GPUs than slots.
    """
    every = {"max_concurrency": 2}  # run, and close meanwhile
    if device == "cuda":
        num_gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
        if not num_gpus or (num_slots or 0) > num_gpus:
            raise UserError(f"{num_slots or 1} CUDA device(s) were wanted, but the Ray cluster has {num_gpus}.")
        return [{**every, "num_gpus": 1} for _ in range(num_slots or num_gpus)]
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [node for node in known if node["Alive"] and node["Resources"].get("CPU")]
    per_node = math.ceil((num_slots or len(nodes)) / len(nodes))
    return [
        {
            **every,
            "num_cpus": int(node["Resources"]["CPU"]) // per_node if reserve else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=True),
        }
        for node in (nodes[slot % len(nodes)] for slot in range(num_slots or len(nodes)))
    ]
