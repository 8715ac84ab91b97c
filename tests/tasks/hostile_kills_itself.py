"""It sends SIGKILL to itself, as an operator would."""

import os
import signal

from healthy import batch_size, build_dataset, build_model  # noqa: F401


def compute_loss(model, batch):
    os.kill(os.getpid(), signal.SIGKILL)
