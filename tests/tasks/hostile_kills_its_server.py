"""It kills the process above it, whenever it runs."""

import os
import signal

from healthy import batch_size, build_dataset, compute_loss  # noqa: F401


def build_model():
    os.kill(os.getppid(), signal.SIGKILL)
    while True:
        signal.pause()
