"""Lengths of samples: what a dataset's samples add to the shape of a batch, read one by one."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..errors import Caught, TaskError
from ..nested import tensors_in
from ..randomness import undisturbed

Length = Callable[[Any], Any]
"""A task's ``length``."""
_MOST = 2**22
"""Most samples that are read: beyond it their numbers alone take the memory of a small model."""
_MOST_LENGTH = 2**40
_NUM_CHECKED = 16
_TOLERANCE = 1.1
"""How many times as many elements a sample may collate to as another that is said to be no shorter."""


@dataclass(frozen=True)
class Sizes:
    """Of samples that were read, in random order: numbers that a batch of them is as large as."""

    places: Tensor
    """(samples,): their indices."""
    rows: Tensor
    """(samples, sizes): by ``length``, one; without it every dimension of the tensors that each collates to alone."""
    num_samples: int
    """In the dataset, read or not."""
    firsts: tuple[int, ...]
    """Columns that are a length: of ``length``; else each tensor's first dimension after the samples'."""

    @property
    def is_whole(self) -> bool:
        """Whether all samples were read."""
        return len(self.places) == self.num_samples

    @property
    def varying(self) -> list[int]:
        """Columns in which samples differ."""
        return [int(column) for column in (self.rows != self.rows[0]).any(0).nonzero()]

    def lengths(self) -> Tensor | None:
        """(samples,): the longest of each sample's lengths; None where samples differ in something else."""
        varying = self.varying or list(self.firsts)
        if not varying or not {*varying} <= {*self.firsts}:
            return None
        return self.rows[:, varying].amax(1)


def read_sizes(
    dataset: Any, collate: Callable[[list[Any]], Any] | None, length: Length | None, most_s: float = math.inf
) -> Sizes | None:
    """Read samples of a map-style dataset in random order, all of them or as many as the time allows. What that draws
    at random is as if it had not been.

    Args:
        dataset: map-style, not empty.
        collate: the user's, or None.
        length: the task's, or None, for shapes.
        most_s: seconds.

    Returns:
        None where samples collate to different numbers of tensors, or one alone cannot be collated.

    Raises:
        TaskError: ``length`` raised, returned no length, or said what the samples' own sizes contradict.
        Exception: whatever the user's dataset raises.
    """
    num_samples, ends_s = len(dataset), perf_counter() + most_s
    order = random.Random(0).sample(range(num_samples), min(num_samples, _MOST))
    collate = collate or default_collate
    with undisturbed():
        firsts = (0,) if length is not None else tuple(_firsts(_shapes(collate, dataset[order[0]]) or []))
        found, places, width = array("q"), array("q"), 0
        for place in order:
            if places and perf_counter() > ends_s:
                break
            row = _row(collate, length, dataset[place], place)
            if not row or (places and len(row) != width):
                return None
            width = len(row)
            found.extend(row)
            places.append(place)
        rows = torch.frombuffer(found, dtype=torch.int64).view(-1, width).clone()
        sizes = Sizes(torch.frombuffer(places, dtype=torch.int64).clone(), rows, num_samples, firsts)
        if length is not None:
            _check(sizes, dataset, collate)
    return sizes


def _row(collate: Callable[[list[Any]], Any], length: Length | None, sample: Any, place: int) -> list[int] | None:
    if length is not None:
        return [_said(length, sample, place)]
    shapes = _shapes(collate, sample)
    return None if shapes is None else [size for shape in shapes for size in shape]


def _said(length: Length, sample: Any, place: int) -> int:
    wanted = "Wanted: def length(sample) -> int  # in tokens"
    with Caught(MemoryError) as raised:  # the user's function raises what it likes
        said = length(sample)
    if raised.error is not None:
        error = raised.take()
        raise TaskError(f"length raised {type(error).__name__}: {error}, for sample {place}. {wanted}.") from error
    said = said.item() if hasattr(said, "item") else said
    if isinstance(said, bool) or not isinstance(said, (int, float)) or not 0 <= said < _MOST_LENGTH:
        raise TaskError(f"length returned {said!r} for sample {place}. {wanted}.")
    return math.ceil(said)


def _shapes(collate: Callable[[list[Any]], Any], sample: Any) -> list[torch.Size] | None:
    with Caught(MemoryError) as raised:  # a collate function may want more than one
        batch = collate([sample])
    return [tensor.shape for tensor in tensors_in(batch)] if raised.error is None else None


def _firsts(shapes: Sequence[torch.Size]) -> Iterator[int]:
    start = 0
    for shape in shapes:
        if len(shape) > 1 and shape[0] == 1:
            yield start + 1
        start += len(shape)


def _check(sizes: Sizes, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
    """Hold lengths against what some samples, short to long, collate to.

    Raises:
        TaskError: one that is said to be no longer than another is larger.
    """
    lengths = sizes.rows[:, 0]
    ranked = lengths.argsort(stable=True)
    chosen = ranked[torch.linspace(0, len(ranked) - 1, min(_NUM_CHECKED, len(ranked))).long()]
    known = []
    for place, said in zip(sizes.places[chosen].tolist(), lengths[chosen].tolist(), strict=True):
        if (shapes := _shapes(collate, dataset[place])) is not None:
            known.append((said, place, sum(map(math.prod, shapes))))
    for said, place, elements in known:
        for other_said, other, fewer in known:
            if said <= other_said and elements > _TOLERANCE * fewer:
                raise TaskError(
                    f"length says that sample {place} ({said}) is no longer than sample {other} ({other_said}), but it "
                    f"collates to {elements:,} elements, and that to {fewer:,}: batches would be larger than lengths "
                    "say. Wanted: a length that a longer sample has more of; of several, the longest."
                )
