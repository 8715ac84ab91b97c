"""It ends its process behind Python's back."""

import os

from healthy import batch_size, build_dataset, build_model  # noqa: F401


def compute_loss(model, batch):
    os._exit(4)
