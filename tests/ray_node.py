"""Another node of a Ray cluster, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.measure.processes import descendants
from autotune.workers.process import end, identify

__all__ = ["TOKEN", "another_node", "on_one_processor"]

TOKEN = {"RAY_AUTH_MODE": "token"}


@contextmanager
def another_node(address: str, folder: Path, before: Callable[[], None] | None = None) -> Iterator[None]:
    """A node of one processor, as long as the body runs.

    Args:
        address: of the cluster.
        folder: gets the node's log.
        before: is called in the node's process, before it starts.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--num-gpus=0"]
    sized = ["--object-store-memory=100000000", f"--address={address}"]
    path, environment = folder / "node.log", {**os.environ, **TOKEN}
    with path.open("w+") as log:
        node = subprocess.Popen([*command, *sized], env=environment, stdout=log, stderr=log, preexec_fn=before)
        try:
            while "Ray runtime started" not in path.read_text():
                assert node.poll() is None, path.read_text()
            yield
        finally:
            end([process for pid in (node.pid, *descendants(node.pid)) if (process := identify(pid))])
            node.wait()


def on_one_processor() -> None:
    """What this process starts computes with one thread."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
