"""What may be the same of a script's batches while they have now more samples, now fewer: their tokens, with padding or
without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, Subset

from ...data.lengths import read_sizes
from ...errors import Caught
from ...nested import tensors_in
from ...randomness import undisturbed
from ...techniques.support.facts import Extent

_FEWEST, _MOST = 8, 64
"""Batches that are looked at."""
_FEWEST_SIZES = 3
"""Different sizes that these have, where they vary: a last batch is one more than the usual."""
_MOST_SAMPLES, _MOST_S = 8192, 10.0
"""Samples that are read of them, unless there are more in the fewest; and for how long."""
_NUM_PASSES = 16
"""Of the model, that are looked at."""
_PASSES_S, _MOST_PASSES_S = 10.0, 60.0
"""How long these may take, and the fewest that tell something."""


class Passes:
    """The sizes of what a script's model is called with."""

    def __init__(self) -> None:
        self._shapes: list[list[torch.Size]] = []

    def add(self, inputs: Any) -> None:
        """The model is called to train."""
        if len(self._shapes) < _NUM_PASSES:
            self._shapes.append([tensor.shape for tensor in tensors_in(inputs) if tensor.dim()])

    def may_tell_more(self, seconds: float) -> bool:
        """Whether they vary in their first dimension, and not enough of them were seen in so many seconds."""
        num = _NUM_PASSES if seconds < _PASSES_S else _FEWEST if seconds < _MOST_PASSES_S else 0
        return len(self._shapes) < num and len({shapes[0][0] for shapes in self._shapes if shapes}) > 1

    def extents(self) -> Iterator[Extent]:
        """Of each of the tensors: its first two dimensions, of which one is samples, or its only one."""
        num = Counter(map(len, self._shapes)).most_common(1)
        for place in range(num[0][0] if num else 0):
            shapes = [each[place] for each in self._shapes if len(each) == num[0][0]]
            dims = {len(shape) for shape in shapes}
            if dims == {1}:
                yield from _extent([(2, shape[0]) for shape in shapes], varies=_vary([shape[0] for shape in shapes]))
            elif 1 not in dims:
                rows, columns = [shape[0] for shape in shapes], [shape[1] for shape in shapes]
                sizes = [(min(row, column), row * column) for row, column in zip(rows, columns, strict=True)]
                in_order = _in_order(rows) or _in_order(columns)
                yield from _extent(sizes, varies=_vary(rows) and _vary(columns), in_order=in_order)


def extents_of(loader: Any) -> Iterator[Extent]:
    """Of the batches that a loader's own sampler puts together, by the lengths of their samples: the longest times
    their number, and all together; each for every side of a sample (source, target), the longest and their sum."""
    if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) in (BatchSampler, type(None)):
        return
    with undisturbed(), Caught(MemoryError):  # the user's sampler and dataset raise what they like
        batches = _batches(loader)
        if not _vary([len(batch) for batch in batches]):
            return
        ends = accumulate(map(len, batches))
        num = max(_FEWEST, sum(end <= _MOST_SAMPLES for end in ends))
        yield from list(_by_lengths(loader, batches[:num]))


def _batches(loader: Any) -> list[list[int]]:
    """The first of a copy of its sampler: its own is read by the script, which may go on where it was left."""
    ends_s = perf_counter() + _MOST_S
    shared = {id(one): one for one in (loader.dataset, getattr(loader.dataset, "dataset", None))}
    found: list[list[int]] = []
    for batch in deepcopy(loader.batch_sampler, shared):
        found += [list(batch)] if batch else []
        if len(found) == _MOST or perf_counter() > ends_s:
            break
    return found


def _by_lengths(loader: Any, batches: Sequence[Sequence[int]]) -> Iterator[Extent]:
    places = list(dict.fromkeys(place for batch in batches for place in batch))
    found = read_sizes(Subset(loader.dataset, places), loader.collate_fn, None, _MOST_S)
    if found is None or not (columns := [one for one in found.varying if one in found.firsts]):
        return
    sides = torch.unique(found.rows[:, columns], dim=1)
    longest = sides.amax(1)
    lengths = {places[place]: number for number, place in enumerate(found.places.tolist())}
    read = [[lengths[place] for place in batch] for batch in batches if all(place in lengths for place in batch)]
    in_order = _in_order([int(longest[batch].max()) for batch in read])
    for length in [longest, *(sides.T if sides.shape[1] > 1 else ()), *([sides.sum(1)] if sides.shape[1] > 1 else ())]:
        stretch = float(length.max() / longest.max())
        for sizes in (_padded(length, read), _summed(length, read)):
            yield from _extent(sizes, varies=True, stretch=stretch, in_order=in_order)


def _padded(length: Tensor, batches: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(len(batch), len(batch) * int(length[batch].max())) for batch in batches]


def _summed(length: Tensor, batches: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(len(batch), int(length[batch].sum())) for batch in batches]


def _vary(counts: Sequence[int]) -> bool:
    """Whether these are no fixed number, with now and then fewer (the last of an epoch, or of a bucket)."""
    seen = Counter(counts)
    return len(counts) >= _FEWEST and len(seen) >= _FEWEST_SIZES and seen[max(seen)] * 2 < len(counts)


def _in_order(lengths: Sequence[int]) -> bool:
    return list(lengths) in (sorted(lengths), sorted(lengths, reverse=True))


def _extent(
    sizes: Sequence[tuple[int, int]], varies: bool, stretch: float = 1.0, in_order: bool = False
) -> Iterator[Extent]:
    """Of so many samples and tokens each, if there are enough of them."""
    several = [tokens for samples, tokens in sizes if samples > 1]
    if varies and len(sizes) >= _FEWEST and several and median(several) * 2 >= max(several):
        yield Extent(usual=median(tokens for _, tokens in sizes), most=max(several), stretch=stretch, in_order=in_order)
