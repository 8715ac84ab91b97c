"""It closes every file descriptor, and forks a child that returns into our code."""

import os

import healthy
from healthy import batch_size, build_dataset, compute_loss  # noqa: F401


def build_model():
    os.closerange(0, 64)
    if os.fork() == 0:
        raise ValueError("raised in the child's child")
    return healthy.build_model()
