"""It leaves a child, and a daemon in a session of its own, and writes their pids to the file ``pids`` beside it."""

import os
import signal
from pathlib import Path

import healthy
from healthy import batch_size, build_dataset, compute_loss  # noqa: F401


def say_pid() -> None:
    with Path(__file__).with_name("pids").open("a") as file:
        file.write(f"{os.getpid()}\n")


def _start(detach: bool) -> None:
    started, tell = os.pipe()
    if os.fork() == 0:
        if detach:
            os.setsid()
            if os.fork():
                os._exit(0)
        say_pid()
        os.write(tell, b".")
        while True:
            signal.pause()
    os.read(started, 1)


def build_model():
    _start(detach=False)
    _start(detach=True)
    return healthy.build_model()
