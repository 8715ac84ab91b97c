"""The process that Ray lives in: one actor per device, each with fork servers of its own. The only importer of ray."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..errors import UserError
from .cluster import WORKER_CONFIG, Answer, Ask, ClusterOptions, Ready, Refused
from .local import LocalSlot
from .orphans import adopt_orphans, end_orphans
from .outcome import OUTCOME, Lost, Outcome
from .pool import SlotPool
from .protocol import receive, send
from .request import REQUEST, TrialRequest
from .trial.environment import THREAD_VARIABLES
from .trial.supervise import end_descendants

__all__ = ["main"]

_GRACE_S = 300.0
"""How long over a trial's deadline an actor may stay silent: it may have to be started on another machine."""
_CLOSE_S = 30.0
_OBJECT_STORE_BYTES = 100 * 2**20
"""Only requests and outcomes cross Ray."""
_NOT_SHIPPED = [".git", ".venv", ".autotune", "__pycache__"]
_FORCED_BY_RAY = frozenset({*THREAD_VARIABLES, "PYTHONBREAKPOINT", "PYTHONUNBUFFERED"})
"""Variables that a Ray worker has and a job would not."""


def main(client: int) -> None:
    """Have a cluster for the driver at the other end of an inherited socket, until it goes.

    Args:
        client: the socket's file descriptor.
    """
    with socket.socket(fileno=client) as connection:
        options = ClusterOptions.model_validate_json(receive(connection) or "")
        starting = threading.Event()
        threading.Thread(target=_end_with_driver, args=(connection, options, starting), daemon=True).start()
        try:
            _serve(connection, options, starting)
        except ConnectionError:  # the driver went before its answer came
            pass
        finally:
            ray.shutdown()
            _leave_nothing(options)


def _end_with_driver(connection: socket.socket, options: ClusterOptions, started: threading.Event) -> None:
    """In a thread: where the driver goes while Ray starts, nobody waits for Ray."""
    if connection.recv(1, socket.MSG_PEEK) == b"" and not started.is_set():
        _leave_nothing(options)
        os._exit(0)


def _leave_nothing(options: ClusterOptions) -> None:
    end_descendants()  # Ray's agents stay for a minute after everything else has gone
    shutil.rmtree(options.folder, ignore_errors=True)


def _serve(connection: socket.socket, options: ClusterOptions, started: threading.Event) -> None:
    try:
        _connect(options)
        placements = _placements(options.device, options.num_slots, reserve=options.address is not None)
    except UserError as error:
        send(connection, Refused(reason=str(error)).model_dump_json())
        return
    adopt_orphans()
    # On this machine a trial sees what a job started here would; elsewhere, what Ray's worker has less Ray's part.
    base = None if options.address else options.environment
    lock = threading.Lock()

    def tell(number: int, future: Future[Outcome]) -> None:
        answer = Answer(number=number, outcome=future.result())
        with lock, contextlib.suppress(OSError):  # the driver has gone, which ends us, too
            send(connection, answer.model_dump_json(by_alias=True))

    with SlotPool([_RaySlot(placement, base) for placement in placements]) as pool:
        started.set()
        address = ray.get_runtime_context().gcs_address
        send(connection, Ready(num_slots=pool.num_slots, address=address).model_dump_json())
        while (text := receive(connection)) is not None:
            ask = Ask.model_validate_json(text)
            pool.submit(ask.request).add_done_callback(partial(tell, ask.number))


class _TrialActor:
    """Lives in a Ray worker; its fork servers and their trials are that worker's descendants."""

    def __init__(self, base: Mapping[str, str] | None) -> None:
        adopt_orphans()  # of a fork server that was killed
        mine = os.environ
        if base is None:
            base = {name: value for name, value in mine.items() if name not in _FORCED_BY_RAY}
        gpus = {name: mine[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in mine}
        self._slot = LocalSlot({**base, **gpus})

    def run(self, request: str) -> str:
        """JSON in, JSON out: objects would tie the driver's version to the worker's."""
        return self._slot.run(REQUEST.validate_json(request)).model_dump_json(by_alias=True)

    def close(self) -> None:
        """End the slot's processes."""
        self._slot.close()


class _RaySlot:
    """One actor, started when it is needed, and again after it was lost."""

    def __init__(self, options: Mapping[str, Any], base: Mapping[str, str] | None) -> None:
        self._options = options
        self._base = base
        self._actor: Any = None
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, request: TrialRequest) -> Outcome:
        """Run a trial under this slot's actor: ``Lost`` where the actor, its worker or its machine was lost, its
        environment cannot be set up, or the slot is closed."""
        try:
            actor = self._living_actor()
            if actor is None:
                return Lost(message="the slot is closed")
            reference = actor.run.remote(request.model_dump_json(by_alias=True))
            return OUTCOME.validate_json(ray.get(reference, timeout=request.deadline_s + _GRACE_S))
        except RayError as error:
            self._kill()
            end_orphans()  # of a worker that was killed
            return Lost(message=f"Ray: {str(error).strip().splitlines()[-1]}")

    def close(self) -> None:
        """End the actor with everything that came of it."""
        with self._lock:
            self._is_closed = True
        if self._actor is not None:
            with contextlib.suppress(RayError):  # it has died already
                ray.get(self._actor.close.remote(), timeout=_CLOSE_S)
            self._kill()

    def _living_actor(self) -> Any:
        with self._lock:
            if self._is_closed:
                return None
            if self._actor is None:
                self._actor = ray.remote(_TrialActor).options(**self._options).remote(self._base)
            return self._actor

    def _kill(self) -> None:
        with self._lock:
            actor, self._actor = self._actor, None
            if actor is not None:
                ray.kill(actor)


def _connect(options: ClusterOptions) -> None:
    """Quietly: no dashboard, no logs of workers.

    Raises:
        UserError: no cluster answers at the address, or none can be started here.
    """
    address = options.address
    chosen: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        shipped = {"working_dir": options.working_dir, "excludes": _NOT_SHIPPED} if options.working_dir else {}
        chosen["runtime_env"] = {**shipped, "env_vars": WORKER_CONFIG}
    else:
        chosen |= {"address": "local", "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        chosen |= {"_temp_dir": options.folder}
    try:
        ray.init(**chosen)
    except Exception as error:  # noqa: BLE001 - Ray raises a plain Exception where its processes do not come up
        where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
        said = " ".join(str(error).split()) or type(error).__name__
        token = " If it asks for a token, set RAY_AUTH_MODE=token." if address else ""
        raise UserError(f"{where} could not be reached: {said}.{token} Or use --executor local.") from None


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
