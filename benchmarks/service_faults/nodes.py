"""Faults of what runs the trials: a real search in the service, over a Ray cluster, while it measures on one of two
nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from autotune.measure.processes import descendants
from autotune.service.store.states import State

from .cluster import Nodes
from .core import ANY_END, Fault
from .searching import Searching

_PAUSE_S, _LONG_PAUSE_S = 10.0, 30.0
"""How long a node is stopped: less than Ray takes to call it dead; and more, where it is told to be quicker."""
_QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
_FAILURES = {"req_failure_prob": 10, "resp_failure_prob": 10, "num_failures": -1}
_FAILURES |= {"num_lower_bound_req_failures": 1, "num_lower_bound_resp_failures": 1}
"""Of each kind of remote call of each process: the first request and the next answer are lost, then 10 % of each."""
_FAILING = (
    "NodeManagerService.grpc_client.RequestWorkerLease",
    "CoreWorkerService.grpc_client.PushTask",
    "ActorInfoGcsService.grpc_client.RegisterActor",
    "ActorInfoGcsService.grpc_client.CreateActor",
    "ActorInfoGcsService.grpc_client.GetActorInfo",
    "NodeInfoGcsService.grpc_client.GetAllNodeInfo",
    "NodeResourceInfoGcsService.grpc_client.GetDrainingNodes",
)
"""Not all (`*`): a node that cannot register, or answer for its health, does not come up."""
_DELAY_US = "100000:1000000"
_DELAYED = (
    "NodeManagerService.grpc_server.RequestWorkerLease",
    "CoreWorkerService.grpc_server.PushTask",
    "ActorInfoGcsService.grpc_server.RegisterActor",
    "ActorInfoGcsService.grpc_server.CreateActor",
    "ActorInfoGcsService.grpc_server.GetActorInfo",
    "NodeInfoGcsService.grpc_server.GetAllNodeInfo",
)
"""Not all (`*`): what a raylet tells itself of objects would change its order, and end it."""
_GIB = 2**30
_SPARE_GIB, _TAKEN_MIB = 4, 4096
"""How much of the machine's free memory Ray leaves alone, and what a trial takes."""


class OverNodes(Searching):
    """A search that is held in a measurement on a node."""

    @staticmethod
    def environment(folder: Path) -> Mapping[str, str]:
        """Of the cluster, and of the driver."""
        return {}

    def driver_options(self) -> tuple[str, ...]:
        """A cluster of its own."""
        self.nodes = Nodes(self.environment)
        return ("--executor=ray", f"--address={self.nodes.address}")

    def is_held(self) -> bool:
        """Whether one waits on a node; ``node`` is where."""
        for node in self.nodes.workers:
            for pid in self.begun() & {*descendants(node.pid)}:
                self.held, self.node = pid, node
        return self.held > 0

    def parent(self, name: str) -> int:
        """Pid of the process above the measurement whose command begins so."""
        pid = self.held
        while not _command(pid).startswith(name):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            assert pid > 1, f"nothing above {self.held} is {name}"
        return pid

    def close(self) -> None:
        """End all that is left."""
        super().close()
        self.nodes.close()


class Unreliable(OverNodes):
    """Remote calls between all processes of the cluster fail."""

    @staticmethod
    def environment(folder: Path) -> Mapping[str, str]:
        """Each process reads it."""
        return {"RAY_testing_rpc_failure": json.dumps({f"ray::rpc::{call}": _FAILURES for call in _FAILING})}


class Slow(OverNodes):
    """Remote calls are answered late."""

    @staticmethod
    def environment(folder: Path) -> Mapping[str, str]:
        """Each process reads it."""
        return {"RAY_testing_asio_delay_us": ",".join(f"{call}={_DELAY_US}" for call in _DELAYED)}


class Impatient(OverNodes):
    """A node that does not answer is soon called dead."""

    @staticmethod
    def environment(folder: Path) -> Mapping[str, str]:
        """The head reads it."""
        return _QUICK


class Remembering(OverNodes):
    """The control process keeps what it knows on disk; else a new one is a new cluster."""

    @staticmethod
    def environment(folder: Path) -> Mapping[str, str]:
        """The head reads it."""
        (path := folder / "control").mkdir()
        return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(path)}


class Short(OverNodes):
    """Ray kills workers before the machine has no memory left: here, a little above what is used already."""

    @staticmethod
    def environment(folder: Path) -> Mapping[str, str]:
        """The nodes read it."""
        kib = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(kib[name]) * 1024 for name in ("MemTotal:", "MemAvailable:"))
        return {"RAY_memory_usage_threshold": f"{1 - (free - _SPARE_GIB * _GIB) / total:.3f}"}


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _kill_worker(the: OverNodes) -> None:
    """SIGKILL of the actor's worker."""
    the.most_lost = 1
    os.kill(the.parent("ray::"), signal.SIGKILL)
    the.go()


def _kill_fork_server(the: OverNodes) -> None:
    """SIGKILL of the fork server."""
    the.most_lost = 1
    above = Path(f"/proc/{the.held}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(above), signal.SIGKILL)
    the.go()


def _kill_node(the: OverNodes) -> None:
    """SIGKILL of the node's raylet."""
    the.most_lost = 1
    os.kill(the.nodes.part("raylet", the.node), signal.SIGKILL)
    the.go()


def _pause_node(the: OverNodes, pause_s: float) -> None:
    """SIGSTOP of the node's raylet for a while."""
    the.most_lost = 1
    raylet = the.nodes.part("raylet", the.node)
    os.kill(raylet, signal.SIGSTOP)
    the.go()
    time.sleep(pause_s)
    os.kill(raylet, signal.SIGCONT)


def _drain_node(the: OverNodes) -> None:
    """The node drains; what it measures ends, and then the node."""
    the.node.send_signal(signal.SIGTERM)
    the.go()
    the.until(lambda: the.node.poll() is not None, "the node's end")


def _drain_and_kill_node(the: OverNodes) -> None:
    """The node drains, and is killed in what it measures."""
    the.node.send_signal(signal.SIGTERM)
    time.sleep(3.0)
    _kill_node(the)


def _kill_cluster(the: OverNodes) -> None:
    """SIGKILL of the cluster's control process; there is a new cluster at the address a moment later."""
    the.most_lost = 2
    os.kill(the.nodes.part("gcs_server", the.nodes.head), signal.SIGKILL)
    the.go()
    the.nodes.end()
    the.nodes.start()


def _restart_control(the: OverNodes) -> None:
    """The cluster's control process is killed, and starts again."""
    the.most_lost = 1
    the.nodes.restart_control()
    the.go()


def _kill_node_and_cancel(the: OverNodes) -> None:
    """The node is killed, and then the search is cancelled, with the best so far."""
    the.most_lost = 1
    os.kill(the.nodes.part("raylet", the.node), signal.SIGKILL)
    the.server.client.cancel(the.search_id)
    the.go()


def _fail_calls(the: OverNodes) -> None:
    """Requests between Ray's processes are lost, and answers."""
    the.most_lost = 9
    the.go()
    the.check(State.SUCCEEDED)
    for what in ("request", "response"):
        assert the.nodes.has_logged(f"Inject RPC {what} failure for "), f"no {what} was lost"


def _delay_calls(the: OverNodes) -> None:
    """What starts actors, and has them do something, waits for 0.1 to 1 s each time."""
    the.go()
    the.check(State.SUCCEEDED)
    assert the.nodes.has_logged("RAY_testing_asio_delay_us is set to "), "Ray has not read it"


def _run_out_of_memory(the: OverNodes) -> None:
    """A trial takes what Ray wants left free: Ray kills its worker, and the loss is no outcome."""
    the.most_lost = 3
    the.misbehave("takes", _TAKEN_MIB)
    the.go()
    the.check(State.SUCCEEDED)
    assert the.nodes.has_logged("due to the node running low on memory"), "Ray has killed nothing"


def _fault(
    name: str,
    do: Callable[[OverNodes], None],
    ends: tuple[State, ...] = (State.SUCCEEDED,),
    scene: type[OverNodes] = OverNodes,
) -> Fault:
    return Fault(name, do, ("trial",), ends, scene=scene)  # type: ignore[arg-type]


FAULTS = (
    _fault("Ray's worker killed", _kill_worker),
    _fault("fork server killed", _kill_fork_server),
    _fault("node killed", _kill_node),
    _fault("node stopped for 10 s", partial(_pause_node, pause_s=_PAUSE_S)),
    _fault("node stopped until it is called dead", partial(_pause_node, pause_s=_LONG_PAUSE_S), scene=Impatient),
    _fault("node drains", _drain_node),
    _fault("node drains, and is killed", _drain_and_kill_node),
    _fault("node killed, then cancelled", _kill_node_and_cancel, ANY_END),
    _fault("cluster killed, and a new one started", _kill_cluster),
    _fault("control process (GCS) killed, and started", _restart_control, scene=Remembering),
    _fault("remote calls of Ray fail", _fail_calls, scene=Unreliable),
    _fault("remote calls of Ray are slow", _delay_calls, scene=Slow),
    _fault("Ray kills a worker for memory", _run_out_of_memory, scene=Short),
)
