"""Its loss never comes, and it leaves processes besides; its own pid comes last."""

import hostile_hang
from hostile_leaves_processes import batch_size, build_dataset, build_model, say_pid  # noqa: F401


def compute_loss(model, batch):
    say_pid()
    hostile_hang.compute_loss(model, batch)
