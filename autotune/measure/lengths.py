"""The longest samples of a dataset: all are read where that is quick, else some, with a bound on the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ..data.lengths import Sizes, read_sizes
from ..data.loader import Loader
from ..data.token_batches import extremes
from ..errors import Caught, TaskError
from ..nested import mapped, tensors_in
from ..task import Task
from ..techniques.support.facts import Lengths
from .tail import RISK, bound

MOST_S = 5.0
"""Longest that lengths are read for."""
_MOST_PLACES = 1024
"""Samples of which the largest batches are made."""


def find_lengths(task: Task, dataset: Any, deterministic: bool, most_s: float = MOST_S) -> Lengths | None:
    """Read lengths, and say which samples make the largest batch.

    Args:
        task: for ``length`` and ``collate``.
        dataset: that it builds.
        deterministic: whether a sample read again is the same; else each epoch draws from the same law anew.
        most_s: seconds.

    Returns:
        None where samples have no lengths that can be read, or all the same.

    Raises:
        TaskError: ``length`` raised, or said what cannot be.
        Exception: whatever the user's dataset raises.
    """
    if isinstance(dataset, IterableDataset):
        if task.length is None:
            return None
        raise TaskError(
            f"{task.source or 'task'}: length is for a map-style dataset, whose samples can be chosen by it, but "
            f"build_dataset returned {type(dataset).__name__}. Leave length out, or return a map-style dataset."
        )
    sizes = read_sizes(dataset, task.collate, task.length, most_s)
    if sizes is None or not (varying := sizes.varying):
        return None
    lengths = sizes.lengths()
    rows = torch.unique(sizes.rows[:, varying], dim=1)
    stretch, risk = _beyond(rows, sizes.num_samples - (len(rows) if deterministic else 0))
    return Lengths(
        read=len(rows),
        samples=sizes.num_samples,
        longest=int(rows.max() if lengths is None else lengths.max()),
        places=_places(sizes, rows),
        in_tokens=lengths is not None,
        stretch=stretch,
        risk=risk,
    )


def _places(sizes: Sizes, rows: Tensor) -> tuple[tuple[int, ...], ...]:
    orders = [*rows.T, rows.sum(1)] if rows.shape[1] > 1 else [*rows.T]
    num = min(len(rows), max(1, _MOST_PLACES // len(orders)))
    return tuple(tuple(sizes.places[order.topk(num).indices].tolist()) for order in orders)


def _beyond(rows: Tensor, num_others: int) -> tuple[float, float]:
    """How many times as large as the largest read another of so many may be, in any of the sizes; and the risk."""
    if num_others == 0:
        return 1.0, 0.0
    found = [(bound(one, num_others, RISK / rows.shape[1]), float(one.max())) for one in rows.T]
    return max(most / max(1.0, longest) for (most, _), longest in found), min(1.0, sum(risk for (_, risk), _ in found))


def longest_batches(loader: Loader, lengths: Lengths) -> Iterator[tuple[Any, int]]:
    """The micro-batches of a loader that may take most memory, on its device, and how many samples each has."""
    batch, known = loader.batch, loader.spec.lengths
    chosen = extremes(known, batch) if known is not None else lengths.batches(batch.micro)
    for places in chosen:
        made = loader.batch_of(places)
        if lengths.stretch > 1:
            made = stretched(made, loader.batch_of(_others(places, lengths.samples)), lengths.stretch)
        yield loader.move(made), len(places)


def _others(places: list[int], num_samples: int) -> list[int]:
    """As many samples, from everywhere: hardly as long."""
    return [number * num_samples // len(places) for number in range(len(places))]


def stretched(batch: Any, other: Any, times: float) -> Any:
    """A batch whose tensors are so many times as large, by repetition, in each dimension in which another one of as
    many samples has another size."""
    others = [tensor.shape for tensor in tensors_in(other)]
    if len(others) != sum(1 for _ in tensors_in(batch)):
        return batch
    shapes = iter(others)

    def longer(tensor: Tensor) -> Tensor:
        shape = next(shapes)
        for dim, (size, found) in enumerate(zip(tensor.shape, shape, strict=False)):
            if size != found and size:
                tensor = tensor.index_select(dim, torch.arange(math.ceil(size * times)) % size)
        return tensor

    return mapped(batch, longer)


def as_runs(lengths: Lengths, batch_of: Callable[[list[int]], Any], run: Callable[[Any], Any]) -> Lengths:
    """The same, without a stretch that the model cannot take (its positions may end): then a longer sample is a risk.

    Args:
        lengths: as found.
        batch_of: makes a batch of some samples.
        run: the model's forward and loss, on the CPU.
    """
    if lengths.stretch == 1:
        return lengths
    with torch.no_grad(), Caught(MemoryError) as raised:  # the user's model raises what it likes
        place = lengths.places[0][0]
        run(stretched(batch_of([place]), batch_of(_others([place], 1)), lengths.stretch))
    if raised.error is None:
        return lengths
    return lengths.model_copy(update={"stretch": 1.0, "risk": 1 - lengths.read / lengths.samples or 1.0})
