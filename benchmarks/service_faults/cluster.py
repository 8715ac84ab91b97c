"""A Ray cluster on this machine: a head and two nodes, as programs of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from autotune.measure.processes import descendants
from autotune.workers.process import end, identify, name_of

_START_S = 180.0
"""The longest that a node may take to come up."""
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
        until = time.monotonic() + _START_S
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < until, f"a node does not come up: {log.read_text()[-2000:]}"
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
