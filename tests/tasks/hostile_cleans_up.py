"""It removes the folder of its fork server, as one does that cleans up temporary files."""

import os
import shutil
from pathlib import Path

import healthy
from healthy import batch_size, build_dataset, compute_loss  # noqa: F401


def own_folder():
    """The trial's: where its stack is written when it crashes."""
    opened = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return Path(next(name for name in opened if name.endswith("/stack"))).parent


def build_model():
    shutil.rmtree(own_folder().parent)
    return healthy.build_model()
