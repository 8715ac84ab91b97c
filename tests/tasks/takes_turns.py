"""Writes when each of its steps began and ended; under autocast it comes to the end that a file here names."""

import os
import signal
import time
from pathlib import Path

import torch
from healthy import batch_size, build_dataset, build_model  # noqa: F401

_HERE = Path(__file__).parent
_SLOWNESS = 100
"""Products of matrices in a step, so that a step is no moment."""
_num_steps = 0


def compute_loss(model, batch):
    global _num_steps
    _num_steps += 1
    began_s = time.monotonic()
    if torch.is_autocast_enabled("cpu"):
        if (_HERE / "raises-at-once").exists():
            raise RuntimeError("at once")
        if (_HERE / "dies-later").exists() and _num_steps > 20:
            os.kill(os.getpid(), signal.SIGKILL)
    matrix = torch.ones(64, 64)
    for _ in range(_SLOWNESS):
        matrix = matrix @ torch.eye(64)
    inputs, targets = batch
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    with (_HERE / f"steps-{os.getpid()}").open("a") as file:
        file.write(f"{began_s} {time.monotonic()}\n")
    return loss
