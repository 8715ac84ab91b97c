"""It prints a great deal: 64 MiB, through Python and past it."""

import os

import healthy
from healthy import batch_size, build_dataset, compute_loss  # noqa: F401


def build_model():
    print("the first line")
    for _ in range(512):
        print("x" * 65535)
        os.write(2, b"y" * 65536)
    print("the last line")
    return healthy.build_model()
