"""Once, it starts a daemon that has nothing in its environment, has that say its pid, and kills the process above."""

import os
import signal
from pathlib import Path

import healthy
from healthy import batch_size, build_dataset, compute_loss  # noqa: F401

HERE = Path(__file__).parent


def build_model():
    if (HERE / "hidden").exists():
        return healthy.build_model()
    (HERE / "hidden").touch()
    if os.fork() == 0:
        os.setsid()
        os.execve("/bin/sh", ["sh", "-c", f"sleep 1000 & echo $! > {HERE}/pids"], {})
    os.wait()
    with (HERE / "said").open():  # a pipe: the test has read the pid
        os.kill(os.getppid(), signal.SIGKILL)
    while True:
        signal.pause()
