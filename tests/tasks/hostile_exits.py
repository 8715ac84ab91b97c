"""It calls sys.exit."""

import sys

from healthy import batch_size, build_dataset, build_model  # noqa: F401


def compute_loss(model, batch):
    sys.exit(3)
