"""Faults of what runs the trials: a real search in the service, over a Ray cluster, while it measures on one of two
nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.measure.processes import descendants
from autotune.service.driver import PROGRAM
from autotune.service.runner import RunnerOptions
from autotune.service.store.states import State
from autotune.workers.process import end, identify, name_of

from ..held_task import HELD
from .core import ANY_END, Fault
from .scene import Scene

__all__ = ["FAULTS"]

SPACE = "schema: autotune/space@1\nprecision: auto\n"
_PAUSE_S = 10.0
"""How long a node is stopped: less than Ray takes to call it dead."""
_RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-gpus=0")
_SIZE = "--object-store-memory=100000000"


class Nodes:
    """A cluster: a head that runs no trials, and two nodes that do."""

    def __init__(self) -> None:
        """Start all, and wait until they are up."""
        os.environ["RAY_AUTH_MODE"] = "disabled"  # drivers inherit it; else it goes by whether the user has a token
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets have short paths
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
        shutil.rmtree(self.folder, ignore_errors=True)


class Searching(Scene):
    """A search that is held in a measurement on a node."""

    bound_s = 300.0

    def make_options(self) -> RunnerOptions:
        """Drivers are real ones."""
        self.nodes, self.held, self.most_lost = Nodes(), 0, 1
        ray = ("--executor=ray", f"--address={self.nodes.address}")
        return replace(super().make_options(), program=PROGRAM, driver_options=ray)

    def hold(self, point: str, **script: Any) -> None:
        """Submit the search, and wait until it is there."""
        self.point = point
        job = self.folder / "job"
        job.mkdir()
        (job / "model.py").write_text(HELD.format(name="model", folder=str(self.folder)))
        (job / "space.yaml").write_text(SPACE)
        spec = {"task": "model.py", "space": "space.yaml", "trials": 1, "trial_time": "0.2s", "device": "cpu"}
        self.search_id = str(self.server.client.submit(job, **spec)["id"])
        self.until(self._is_held, "a measurement")

    def _begun(self) -> set[int]:
        return {int(path.name.partition("-")[2]) for path in self.folder.glob("begun-*")}

    def _is_held(self) -> bool:
        for node in self.nodes.workers:
            for pid in self._begun() & {*descendants(node.pid)}:
                self.held, self.node = pid, node
        return self.held > 0

    def parent(self, name: str) -> int:
        """Pid of the process above the measurement whose command begins so."""
        pid = self.held
        while not _command(pid).startswith(name):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            assert pid > 1, f"nothing above {self.held} is {name}"
        return pid

    def go(self) -> None:
        """Let all measurements go on."""
        (self.folder / "go").touch()

    def check_trials(self, search: dict[str, Any], states: list[State], trials: list[dict[str, Any]]) -> None:
        """A loss is no outcome; what has begun is told, but what was lost."""
        assert {each["outcome"] for each in trials} <= {"measured"}, trials
        kinds = ("trial_ended", "finalist_ended")
        told = [each for each in self.server.client.events(self.search_id) if each["kind"] in kinds]
        assert not [*filter(identify, self._begun())], "a measurement is left"
        assert 0 <= len(self._begun()) - len(told) <= self.most_lost, f"{self._begun()} began, {len(told)} are told"
        if search["state"] == State.SUCCEEDED:
            assert self.server.client.text(self.search_id, "plan").startswith("schema: autotune/plan")

    def close(self) -> None:
        """End all that is left."""
        super().close()
        self.nodes.close()


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _kill_worker(the: Searching) -> None:
    """SIGKILL of the actor's worker."""
    os.kill(the.parent("ray::"), signal.SIGKILL)
    the.go()


def _kill_fork_server(the: Searching) -> None:
    """SIGKILL of the fork server."""
    above = Path(f"/proc/{the.held}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(above), signal.SIGKILL)
    the.go()


def _kill_node(the: Searching) -> None:
    """SIGKILL of the node's raylet."""
    os.kill(the.nodes.part("raylet", the.node), signal.SIGKILL)
    the.go()


def _pause_node(the: Searching) -> None:
    """SIGSTOP of the node's raylet for a while."""
    raylet = the.nodes.part("raylet", the.node)
    os.kill(raylet, signal.SIGSTOP)
    the.go()
    time.sleep(_PAUSE_S)
    os.kill(raylet, signal.SIGCONT)


def _drain_node(the: Searching) -> None:
    """The node drains; what it measures ends, and then the node."""
    the.most_lost = 0
    the.node.send_signal(signal.SIGTERM)
    the.go()
    the.until(lambda: the.node.poll() is not None, "the node's end")


def _drain_and_kill_node(the: Searching) -> None:
    """The node drains, and is killed in what it measures."""
    the.node.send_signal(signal.SIGTERM)
    time.sleep(3.0)
    _kill_node(the)


def _kill_cluster(the: Searching) -> None:
    """SIGKILL of the cluster's control process; there is a new cluster at the address a moment later."""
    the.most_lost = 2
    os.kill(the.nodes.part("gcs_server", the.nodes.head), signal.SIGKILL)
    the.go()
    the.nodes.end()
    the.nodes.start()


def _kill_node_and_cancel(the: Searching) -> None:
    """The node is killed, and then the search is cancelled, with the best so far."""
    os.kill(the.nodes.part("raylet", the.node), signal.SIGKILL)
    the.server.client.cancel(the.search_id)
    the.go()


def _fault(name: str, do: Callable[[Searching], None], ends: tuple[State, ...] = (State.SUCCEEDED,)) -> Fault:
    return Fault(name, do, ("trial",), ends, scene=Searching)  # type: ignore[arg-type]


FAULTS = (
    _fault("Ray's worker killed", _kill_worker),
    _fault("fork server killed", _kill_fork_server),
    _fault("node killed", _kill_node),
    _fault("node stopped for 10 s", _pause_node),
    _fault("node drains", _drain_node),
    _fault("node drains, and is killed", _drain_and_kill_node),
    _fault("node killed, then cancelled", _kill_node_and_cancel, ANY_END),
    _fault("cluster killed, and a new one started", _kill_cluster),
)
