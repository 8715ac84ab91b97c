"""Faults of what runs the trials: a real search in the service, over a Ray cluster, while it measures on one of two
nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from autotune.measure.processes import descendants
from autotune.service.store.states import State
from autotune.workers.process import end, identify, name_of

from .core import ANY_END, Fault
from .searching import Searching

__all__ = ["FAULTS"]

_PAUSE_S, _LONG_PAUSE_S = 10.0, 30.0
"""How long a node is stopped: less than Ray takes to call it dead; and more, where it is told to be quicker."""
_QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
_FAILURES = {"num_failures": -1, "req_failure_prob": 10, "resp_failure_prob": 10}
"""Of each kind of remote call: without end, 10 % of requests and 10 % of answers are lost."""
_DELAY_US = "1000:30000"
_GIB = 2**30
_SPARE_GIB, _TAKEN_MIB = 4, 4096
"""How much of the machine's free memory Ray leaves alone, and what a trial takes."""
_RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-gpus=0")
_SIZE = "--object-store-memory=100000000"


class Nodes:
    """A cluster: a head that runs no trials, and two nodes that do."""

    def __init__(self, environment_in: Callable[[Path], Mapping[str, str]]) -> None:
        """Start all, and wait until they are up. Drivers that are started later have the environment, too, which may
        name files in the folder that it is given."""
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets have short paths
        environment = environment_in(self.folder)
        self._before = {name: os.environ.get(name) for name in environment}
        os.environ |= {"RAY_AUTH_MODE": "disabled", **environment}  # else it goes by whether the user has a token
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._running: list[subprocess.Popen[bytes]] = []
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Also where the cluster that was there has died."""
        head = ("--head", "--node-ip-address=127.0.0.1", f"--port={self.port}")
        self.head = self._start("head", *head, "--include-dashboard=false", "--num-cpus=0")
        node = (f"--address={self.address}", "--node-ip-address=127.0.0.1", "--num-cpus=1")
        self.workers = [self._start(name, *node) for name in ("one", "other")]

    def _start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{name}.log"
        command = [*_RAY, _SIZE, f"--temp-dir={self.folder / name}", *options]
        with log.open("w") as file:
            node = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self._running.append(node)
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None, log.read_text()[-2000:]
            time.sleep(0.05)
        return node

    def part(self, name: str, node: subprocess.Popen[bytes]) -> int:
        """Pid of a process of a node."""
        below = filter(None, map(identify, descendants(node.pid)))
        return next(process.pid for process in below if name_of(process) == name)

    def has_logged(self, words: str) -> bool:
        """Whether a process of Ray's has."""
        logs = self.folder.glob("*/session_2*/logs/*")
        return any(words in log.read_text(errors="replace") for log in logs if log.is_file())

    def restart_control(self) -> None:
        """SIGKILL of the head's control process, which is then started as it was. The program that watches over the
        head is stopped, for it would end the rest."""
        self.head.send_signal(signal.SIGSTOP)
        pid = self.part("gcs_server", self.head)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        environment = dict(each.split(b"=", 1) for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")[:-1])
        os.kill(pid, signal.SIGKILL)
        with (self.folder / "control.log").open("w") as log:
            again = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._running.append(again)

    def end(self) -> None:
        """End all, with all that came of them."""
        while self._running:
            node = self._running.pop()
            pids = (node.pid, *descendants(node.pid))
            end([process for pid in pids if (process := identify(pid))])
            node.wait()

    def close(self) -> None:
        """End all, and remove their files."""
        self.end()
        for name, value in self._before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        shutil.rmtree(self.folder, ignore_errors=True)


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
        return {"RAY_testing_rpc_failure": json.dumps({"*": _FAILURES})}


class Slow(OverNodes):
    """Remote calls are answered late."""

    @staticmethod
    def environment(folder: Path) -> Mapping[str, str]:
        """Each process reads it."""
        return {"RAY_testing_asio_delay_us": f"*={_DELAY_US}"}


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
    """A tenth of all requests between Ray's processes is lost, and a tenth of the answers."""
    the.most_lost = 9
    the.go()
    the.check(State.SUCCEEDED)
    for what in ("request", "response"):
        assert the.nodes.has_logged(f"Inject RPC {what} failure for "), f"no {what} was lost"


def _delay_calls(the: OverNodes) -> None:
    """All that Ray's processes do for one another waits for 1 to 30 ms first."""
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
