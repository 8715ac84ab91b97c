"""Its model cannot be built."""

from healthy import batch_size, build_dataset, compute_loss  # noqa: F401


def build_model():
    widths = []
    return widths[0]
