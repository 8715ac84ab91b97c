"""What it comes to cannot be written: the disk of the trial's own folder is full."""

import os

import healthy
from healthy import batch_size, build_dataset, compute_loss  # noqa: F401
from hostile_cleans_up import own_folder


def build_model():
    (own_folder() / f"outcome.json.{os.getpid()}").symlink_to("/dev/full")
    return healthy.build_model()
