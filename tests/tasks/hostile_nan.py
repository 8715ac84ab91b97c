"""Its loss is not a number from the third step on."""

import itertools

import healthy
from healthy import batch_size, build_dataset, build_model  # noqa: F401

_calls = itertools.count(1)


def compute_loss(model, batch):
    loss = healthy.compute_loss(model, batch)
    return loss if next(_calls) < 3 else loss * float("nan")
