"""Another node of a Ray cluster, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.measure.processes import descendants
from autotune.workers.process import ProcessId, end, identify, name_of

TOKEN = {"RAY_AUTH_MODE": "token"}


@dataclass(frozen=True)
class Node:
    """A node that is up."""

    process: subprocess.Popen[bytes]
    log: Path

    def raylet(self) -> ProcessId:
        """The process without which there is no node."""
        below = filter(None, map(identify, descendants(self.process.pid)))
        return next(process for process in below if name_of(process) == "raylet")


@contextmanager
def another_node(
    address: str, log: Path, before: Callable[[], None] | None = None, num_gpus: int = 0
) -> Iterator[Node]:
    """A node of one processor, as long as the body runs.

    Args:
        address: of the cluster.
        log: a file, for what the node says.
        before: is called in the node's process, before it starts.
        num_gpus: that it says it has.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    with tempfile.TemporaryDirectory(prefix="autotune-node-", ignore_cleanup_errors=True) as own, log.open("w") as file:
        # in a folder of its own, as on another machine: nodes of one folder unpack the tasks into one place
        command += [
            f"--num-gpus={num_gpus}",
            "--object-store-memory=100000000",
            f"--address={address}",
            f"--temp-dir={own}",
        ]
        environment = {**os.environ, **TOKEN}
        node = Node(subprocess.Popen(command, env=environment, stdout=file, stderr=file, preexec_fn=before), log)
        try:
            while "Ray runtime started" not in log.read_text():
                assert node.process.poll() is None, log.read_text()
                time.sleep(0.05)
            yield node
        finally:
            pids = (node.process.pid, *descendants(node.process.pid))
            end([process for pid in pids if (process := identify(pid))])
            node.process.wait()


def on_one_processor() -> None:
    """What this process starts computes with one thread."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
