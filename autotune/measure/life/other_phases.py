"""The phases of a job's life beside its training and its evaluation: an epoch's last batch, and saving."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ...errors import Caught
from ...nested import bytes_in, rows_of
from ...ranks import world_size
from ...training.out_of_memory import is_out_of_memory
from ...training.training import Training
from ..measurement import LifeOptions
from ..memory import Charge
from ..steps import Steps

_WRITTEN_PER_S = 100e6
"""Bytes that a disk is sure to take."""
_ROOM = 1.5
"""Times what is saved that has to be free on it."""


def measure_last_batch(steps: Steps, charge: Charge, options: LifeOptions) -> Iterator[str]:
    """Train on a batch as small as the last one of an epoch, unless an epoch's end was seen.

    Yields:
        That it cannot be trained on, as BatchNorm refuses a single sample.

    Raises:
        Exception: memory ran out.
    """
    training = steps.training
    size = last_batch_size(training)
    is_seen = steps.feed.has_restarted or steps.compile_time.seconds() > options.most_s
    if size is None or is_seen or world_size() > 1:
        return
    batch, position = steps.feed.next()
    with Caught(ValueError) as raised:  # rows that cannot be told from columns
        batch = rows_of(batch, position.num_samples, slice(0, size))
    if raised.error is not None:
        return
    charge.enter("last_batch")
    with Caught(frames=True) as failed:
        steps.repeat(batch)
        steps.settle()
    charge.enter(None)
    if failed.error is None:
        return
    if is_out_of_memory(failed.error):
        raise failed.take()
    said = f"{type(failed.error).__name__}: {failed.error}"
    yield (
        f"the last batch of an epoch has {size} samples, and a step on so many raised {said}. loader_options = "
        '{"drop_last": True} leaves it out'
    )


def last_batch_size(training: Training) -> int | None:
    """Samples of an epoch's last micro-batch, where it is a smaller one; None where all are alike, or it is not
    known."""
    loader = training.loader
    num_samples, micro = loader.num_samples, loader.batch.micro
    if num_samples is None or loader.spec.options.get("drop_last") or num_samples < micro:
        return None
    return num_samples % loader.batch.num_samples % micro or None


def measure_saving(training: Training, charge: Charge, options: LifeOptions) -> None:
    """Save the training's state as a job does, unless that is likely to take too long, or more than there is room
    for."""
    size = state_bytes(training)
    folder = Path(options.state).parent if options.state is not None else Path(tempfile.gettempdir())
    is_long = size / _WRITTEN_PER_S > options.most_s
    if world_size() > 1 or is_long or shutil.disk_usage(folder).free < _ROOM * size:
        return
    charge.enter("saving")
    if options.state is not None:
        torch.save(training.state_dict(), options.state)
    else:
        with tempfile.TemporaryDirectory(prefix="autotune-") as made:
            torch.save(training.state_dict(), Path(made) / "state.pt")
    charge.enter(None)


def state_bytes(training: Training) -> int:
    """What the state of model and optimizer takes."""
    states = (training.model.state_dict(), training.optimizer.state_dict())
    return bytes_in(states)
