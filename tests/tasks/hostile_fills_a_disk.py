"""It writes to a disk that is full."""

from healthy import batch_size, build_dataset, compute_loss  # noqa: F401


def build_model():
    with open("/dev/full", "w") as file:
        file.write("cached")
