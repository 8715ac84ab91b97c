"""Its loss reads address zero."""

import ctypes

from healthy import batch_size, build_dataset, build_model  # noqa: F401


def compute_loss(model, batch):
    return ctypes.string_at(0)
