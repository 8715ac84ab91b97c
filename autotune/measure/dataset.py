"""Facts about a dataset, from a few of its samples."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from ..data.loader import EMPTY
from ..data.own_loader import OwnLoader
from ..data.sameness import NUM_SAMPLES, mixed, reads_alike
from ..errors import TaskError
from ..nested import bytes_in, tensors_in
from ..task import Task

_BATCHES = 4
"""Batches that are read of a loader of the task's own."""


@dataclass(frozen=True)
class DatasetFacts:
    """A dataset's properties."""

    samples: list[Any]
    """Up to 16 samples, as the dataset gives them: drawn from all of a map-style one, the first of a stream."""
    length: int | None
    """Samples; None for a stream that does not say."""
    num_bytes: int | None
    """Bytes of all samples' tensors, by the mean of those read; None when unknown."""
    deterministic: bool
    """Whether samples read again are the same; a stream is not read again."""
    stackable: bool
    """Whether the samples collate to one shape by torch's own collate."""
    shapes_vary: bool
    """Whether samples collate to different shapes."""
    on_device: bool = False
    """Whether they collate to tensors that are on a device already."""


def inspect_dataset(task: Task, dataset: Any) -> DatasetFacts:
    """Read a few samples, some of them twice.

    Raises:
        TaskError: the dataset is empty, or is none.
        Exception: whatever the user's dataset or collate raises.
    """
    streams = isinstance(dataset, IterableDataset)
    if not streams and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TaskError(
            f"{task.source or 'task'}: build_dataset must return a map-style dataset (__len__ and __getitem__) or an "
            f"IterableDataset, but got {type(dataset).__name__}."
        )
    own = isinstance(dataset, OwnLoader)
    length = dataset.num_samples() if own else len(dataset) if hasattr(dataset, "__len__") else None
    indices = [] if streams or length is None else mixed(length)
    if own:
        dataset.check_size(1)
    num_read = _BATCHES * NUM_SAMPLES if own else NUM_SAMPLES  # shapes vary between batches, not within one
    samples = list(itertools.islice(iter(dataset), num_read)) if streams else [dataset[i] for i in indices]
    if not samples:
        raise TaskError(EMPTY)
    collate = task.collate or default_collate
    collated = [list(tensors_in(collate([sample]))) for sample in samples]
    shapes = {tuple((t.dtype, t.shape) for t in tensors) for tensors in collated}
    sizes = [bytes_in(tensors) for tensors in collated]
    return DatasetFacts(
        samples=samples[:NUM_SAMPLES],
        length=length,
        num_bytes=length * sum(sizes) // len(sizes) if length is not None and any(sizes) else None,
        deterministic=not streams and reads_alike(dataset, collate, indices),
        stackable=not streams and task.collate is None and len(shapes) == 1 and any(sizes),
        shapes_vary=len(shapes) > 1,
        on_device=any(t.device.type != "cpu" for tensors in collated for t in tensors),
    )
