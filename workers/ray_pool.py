"""The process that Ray lives in: an actor for each device, with fork servers of its own. With `_ray_slot` the only
importer of ray."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ray
from pydantic import BaseModel
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..errors import Caught, TrialsLost, UnlikeDevices, UserError
from ..internals import TRIED, lost
from ..measure.processes import read
from ._ray_slot import PLACED, VISIBLE, Device, RaySlot
from .cluster import ASKED, WORKER_CONFIG, Answer, Ask, Changed, ClusterOptions, Ready, Refused, Waiting
from .local import is_any_held
from .outcome import Lost, Outcome
from .placement import check_nodes, choose_type, slots_here, trial_size, types_here
from .pool import Joining, SlotPool, TurnsPool
from .process import adopt_orphans
from .protocol import receive, send
from .trial.supervise import end_descendants

_LOOK_S = 2.0
"""How often to look for nodes that have come or gone."""
_PROBE_S = 60.0
"""How long a node may take to say what devices it has: a worker of its own is started."""
_OBJECT_STORE_BYTES = 100 * 2**20
"""Only requests and outcomes cross Ray."""
_NOT_SHIPPED = [".git", ".venv", ".autotune", "__pycache__"]


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


def tell_kind(address: str) -> None:
    """Print the kind of devices that the cluster at ``address`` has."""
    own: dict[str, Any] = {
        "device_name": None,
        "gpus_per_trial": 1,
        "working_dir": None,
        "in_turns": False,
        "folder": "",
        "environment": {},
    }
    _connect(ClusterOptions(device="cpu", address=address, **own))
    print("cuda" if _nodes("cuda") else "cpu")


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
        cluster = _Cluster(options)
        slots = cluster.slots()
    except UserError as error:
        types = error.types if isinstance(error, UnlikeDevices) else ()
        refused = Refused(reason=str(error), is_lost=isinstance(error, TrialsLost), types=types)
        send(connection, refused.model_dump_json())
        return
    adopt_orphans()
    lock, ended = threading.Lock(), threading.Event()

    def tell(said: BaseModel) -> None:
        with lock, contextlib.suppress(OSError):  # the driver has gone, which ends us, too
            send(connection, said.model_dump_json(by_alias=True))

    def answer(number: int, future: Future[Outcome]) -> None:
        tell(Answer(number=number, outcome=_outcome_of(future)))

    def tell_of_waiting() -> None:
        tell(Waiting(num_slots=len(slots), device_type=cluster.type))

    own = slots if options.address is None else []
    with (
        TurnsPool(own, cluster.has, cluster.is_used, tell_of_waiting)
        if options.in_turns and options.address
        else SlotPool(own, cluster.has, cluster.is_used)
    ) as pool:
        joined = Joining(pool, cluster.has)
        if options.address:
            joined.begin(slots)
            threading.Thread(target=cluster.follow, args=(pool, joined, ended), daemon=True).start()
            joined.wait_for_one(tell_of_waiting)
        started.set()
        address = ray.get_runtime_context().gcs_address
        tell(Ready(num_slots=pool.num_slots, address=address, device_type=cluster.type))
        if options.address:
            joined.tell = lambda: tell(Changed(num_slots=pool.num_slots))
            joined.tell()  # of those that came meanwhile
        while (text := receive(connection)) is not None:
            asked = ASKED.validate_json(text)
            if isinstance(asked, Ask):
                pool.submit(asked.request).add_done_callback(partial(answer, asked.number))
            else:
                pool.share(asked.others_wait)
        ended.set()


def _outcome_of(future: Future[Outcome]) -> Outcome:
    """Also of a failure that nobody foresaw: the driver waits for an answer."""
    error = future.exception()
    return future.result() if error is None else Lost(message=f"{type(error).__name__}: {error}")


def _connect(options: ClusterOptions) -> None:
    """Quietly: no dashboard, no logs of workers.

    Raises:
        TrialsLost: no cluster answers at the address, or none can be started here, or this Ray is not as it was tried.
    """
    if (reason := lost("ray_pool")) is not None:
        raise TrialsLost(f"{reason}. Use ray {TRIED['ray']}, or --executor local.")
    address = options.address
    chosen: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        chosen["runtime_env"] = {**_shipped(options.working_dir), "env_vars": WORKER_CONFIG}
    else:
        chosen |= {"address": "local", "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        chosen |= {"_temp_dir": options.folder}
    with Caught() as raised:  # Ray raises a plain Exception where its processes do not come up
        ray.init(**chosen)
    if (error := raised.error) is not None:
        where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
        said = " ".join(str(error).split()) or type(error).__name__
        token = " If it asks for a token, set RAY_AUTH_MODE=token." if address else ""
        raise TrialsLost(f"{where} could not be reached: {said}.{token} Or use --executor local.") from None


def _shipped(folder: str | None) -> dict[str, Any]:
    """What Ray is told of the folder that it ships. What is neither a file nor a folder stays here, written as in a
    .gitignore: Ray would wait for someone to write into a named pipe."""
    if folder is None:
        return {}
    left_out = [*_NOT_SHIPPED]
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_SHIPPED]
        others = [path for name in files if not (path := Path(where, name)).is_file()]
        left_out += [re.sub(r"([][*?!#\\ ])", r"\\\1", f"/{path.relative_to(folder).as_posix()}") for path in others]
    return {"working_dir": folder, "excludes": left_out}


def _nodes(device: Literal["cpu", "cuda"]) -> dict[str, dict[str, Any]]:
    """What Ray says of the nodes that have such devices, by their ids, without those that drain: what is placed there
    waits, and they end once nothing runs there."""
    from ray._private.state import state

    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    draining: Mapping[str, int] = state.get_draining_nodes()  # Ray has no public word for it; Ray Train asks so, too
    wanted = {"cpu": "CPU", "cuda": "GPU"}[device]
    here = [node for node in known if node["Alive"] and node["NodeID"] not in draining]
    return {node["NodeID"]: node for node in here if node["Resources"].get(wanted, 0) >= 1}


def _types_on_node(kind: Literal["cpu", "cuda"]) -> list[str]:
    """In a worker there: Ray hides all GPUs from one that was given none. It began with what the node was started with,
    which may leave out unlike ones."""
    pairs = (pair.partition("=") for pair in read(Path("/proc/self/environ")).split("\0"))
    began_with = {name: value for name, _, value in pairs}
    os.environ.pop(VISIBLE, None)
    os.environ.update({VISIBLE: began_with[VISIBLE]} if VISIBLE in began_with else {})
    return types_here(kind)


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    """There or nowhere: what waits for another machine would wait for one that is full."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


class _Cluster:
    """The devices of one type, on the nodes that there are at the moment."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._types: dict[str, list[str]] = {}
        self._seen: dict[str, dict[str, Any]] = {}
        self.type = ""
        """What comes later is to be like it."""
        self._size = 1
        """GPUs of a trial."""

    def has(self, slot: RaySlot) -> bool:
        """Whether its node is still there, and stays."""
        return slot.node in self._look()

    def is_used(self, slot: RaySlot) -> bool:
        """Whether others have its device: by the name that they hold, or by what Ray has left to give there."""
        if slot.place is not None:
            return is_any_held(slot.place.environment)
        if slot.device is None or slot.has_device:
            return False
        from ray._private.state import available_resources_per_node

        left: dict[str, float] = {}
        with contextlib.suppress(RayError):
            left = available_resources_per_node().get(slot.node, {})  # type: ignore[no-untyped-call]
        return any(left.get(name, 0) < number for name, number in slot.device.needs.items())

    def slots(self) -> list[RaySlot]:
        """Of the nodes that are here now.

        Raises:
            UserError: none has such a device, or they have several types.
            TrialsLost: there are no nodes for trials at the moment.
        """
        nodes, kind = self._look(), self._options.device
        if self._options.address is None:
            return self._slots_here(*nodes)
        self._types = self._types_on(nodes)
        check_nodes(self._options.address, nodes, self._types, _nodes("cpu"))
        self.type, chosen = choose_type(self._types, kind, self._options.device_name)
        if kind == "cuda":
            self._size = trial_size(self._options.gpus_per_trial, max(chosen.values()), self.type)
        return [slot for node, number in chosen.items() for slot in self._slots_of(nodes[node], number)]

    def _slots_here(self, node: str) -> list[RaySlot]:
        """As on this machine without Ray: nobody else uses this cluster, and Ray knows neither the instances of a split
        GPU nor which of unlike ones it gives."""
        asked = self._options
        self.type, found = slots_here(asked.device, asked.device_name, asked.gpus_per_trial)
        return [
            RaySlot(name, node, place=place._replace(environment={**asked.environment, **place.environment}))
            for name, place in found.items()
        ]

    def follow(self, pool: SlotPool[RaySlot], joined: Joining[RaySlot], ended: threading.Event) -> None:
        """In a thread: nodes come and go."""
        while not ended.wait(_LOOK_S):
            nodes = self._look()
            gone, new = self._types.keys() - nodes, {id: node for id, node in nodes.items() if id not in self._types}
            if not gone and not new:
                continue
            pool.retire(lambda slot, gone=gone: slot.node in gone)  # type: ignore[misc]
            self._types = {id: row for id, row in self._types.items() if id not in gone} | self._types_on(new)
            for id, node in new.items():
                if set(self._types.get(id, ())) == {self.type}:
                    joined.begin(self._slots_of(node, len(self._types[id])))
            joined.tell()

    def _look(self) -> dict[str, dict[str, Any]]:
        """The nodes that there are; where the cluster's control process (GCS) is away for a moment, as it was."""
        with contextlib.suppress(RayError):
            self._seen = _nodes(self._options.device if self._options.address else "cpu")
        return self._seen

    def _types_on(self, nodes: Mapping[str, dict[str, Any]]) -> dict[str, list[str]]:
        """The types of each node's devices, as it reads them; of one that does not answer, nothing."""
        if not nodes:
            return {}
        probe = ray.remote(_types_on_node)
        asked = {
            id: probe.options(num_cpus=0, scheduling_strategy=_on(id)).remote(self._options.device) for id in nodes
        }
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_PROBE_S)
        found = {}
        for id, answer in asked.items():
            with contextlib.suppress(RayError):
                found[id] = self._counted(nodes[id], ray.get(answer, timeout=0))
        return found

    def _counted(self, node: Mapping[str, Any], types: list[str]) -> list[str]:
        """As many as Ray has to give."""
        number = 1 if self._options.device == "cpu" else int(node["Resources"]["GPU"])
        if len(set(types)) == 1:
            return types[:1] * number
        return types or ["GPU"] * number

    def _slots_of(self, node: Mapping[str, Any], number: int) -> list[RaySlot]:
        """A GPU each, or those of a trial; or the machine, with its processors where others may want them."""
        needs = {"GPU": self._size, "CPU": 1}  # what others ask Ray for in a GPU's name has a processor with it
        if self._options.device == "cpu":
            needs = {"CPU": int(node["Resources"]["CPU"])}
        id = node["NodeID"]
        placed = {**PLACED, "scheduling_strategy": _on(id)}
        name = f"{node['NodeManagerHostname']}/{id[:6]}"
        names = [
            f"{name} GPU {', '.join(map(str, range(at, at + self._size)))}" if self._options.device == "cuda" else name
            for at in range(0, number - self._size + 1, self._size)
        ]
        return [RaySlot(each, id, Device(id, needs), placed) for each in names]
