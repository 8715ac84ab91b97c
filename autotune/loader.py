"""``Loader``: micro-batches on the device, cut so that optimizer steps see whole effective batches."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from .errors import PlanError, TaskError
from .positions import Position, Positions
from .techniques import LoaderSpec
from .techniques.batch import Batch

__all__ = ["Loader", "tensors_in", "to_device"]

_WORKER_OPTIONS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


class Loader:
    """A DataLoader over one :class:`Batch`: yields micro-batches on the device and knows where each stands.

    A short tail of the dataset forms a smaller optimizer step of its own, unless the user's loader drops it.
    """

    def __init__(self, spec: LoaderSpec, batch: Batch, sampler: Any) -> None:
        """
        Args:
            spec: dataset, collate, options and device.
            batch: how an optimizer step is cut into micro-batches.
            sampler: indices of a map-style dataset; None for an iterable one.

        Raises:
            TaskError: the dataset is empty.
            PlanError: an iterable dataset cannot be cut into uneven micro-batches.
        """
        self.batch = batch
        self.spec = spec
        self.device = spec.device
        self.position: Position | None = None
        """Of the micro-batch yielded last."""
        self.positions = Positions()
        """Of those that were yielded and not yet trained on."""
        self.epoch = 0
        self._sampler = sampler
        self._cut: _Cut | None = None
        options = _worker_options(spec.options)
        if isinstance(spec.dataset, IterableDataset):
            if batch.effective is not None:
                raise PlanError(
                    f"settings.batch.effective: an iterable dataset is read in equal micro-batches of {batch.micro}, "
                    f"but got {batch.effective} samples in {batch.accumulate} of them. Use a micro that divides it."
                )
            counted = _Counted(spec.collate or default_collate)
            self._data: DataLoader[Any] = DataLoader(
                spec.dataset, batch_size=batch.micro, collate_fn=counted, **options
            )
        else:
            if len(spec.dataset) == 0:
                raise TaskError("build_dataset returned an empty dataset. Training needs at least one sample.")
            self._cut = _Cut(sampler, batch, options.pop("drop_last", False))
            self._data = DataLoader(spec.dataset, batch_sampler=self._cut, collate_fn=spec.collate, **options)
        self._non_blocking = bool(options.get("pin_memory"))

    def __len__(self) -> int:
        """Micro-batches in one epoch."""
        return len(self._data)

    @property
    def options(self) -> dict[str, Any]:
        """The settings of the underlying DataLoader that bear on speed."""
        names = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
        return {name: getattr(self._data, name) for name in names}

    @property
    def num_samples(self) -> int | None:
        """Samples in one epoch; None for a stream that does not say."""
        counted = self._sampler if isinstance(self._sampler, Sized) else self.spec.dataset
        return len(counted) if isinstance(counted, Sized) else None

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self)

    def begin(self) -> tuple[int, Iterator[tuple[Any, Position]]]:
        """Start an epoch: its number, and its batches before they are moved."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        self.positions.begin(self.epoch)
        return self.epoch, self._iterate_stream() if self._cut is None else self._iterate_map(self._cut)

    def move(self, batch: Any) -> Any:
        """A batch on the device."""
        return to_device(batch, self.device, self._non_blocking)

    def _iterate_map(self, cut: _Cut) -> Iterator[tuple[Any, Position]]:
        data = iter(self._data)
        places = cut.places  # this iteration's own

        def with_place(batch: Any) -> tuple[Any, Position]:
            if places is not cut.places and self._data.persistent_workers:
                raise TaskError(
                    "training.loader was iterated anew, and its persistent workers serve one iteration at a time. "
                    "End one before the next begins, or set persistent_workers to false."
                )
            return batch, places.popleft()

        return map(with_place, data)

    def _iterate_stream(self) -> Iterator[tuple[Any, Position]]:
        """One batch behind the stream, so that the last one is known to end its step."""
        place, held = 0, None
        for num_samples, batch in self._data:
            if held is not None:
                place += 1
                yield held[1], Position(held[0], place % self.batch.accumulate == 0)
            held = num_samples, batch
        if held is None:
            raise TaskError("build_dataset returned an empty dataset. Training needs at least one sample.")
        yield held[1], Position(held[0], ends_step=True)


class _Epoch(Iterator[Any]):
    """One iteration over a loader; like a DataLoader's own it keeps no batch that it has yielded."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._number = 0
        self._batches: Iterator[tuple[Any, Position]] | None = None

    def __next__(self) -> Any:
        loader = self._loader
        if self._batches is None:
            self._number, self._batches = loader.begin()
        try:
            batch, position = next(self._batches)
        except StopIteration:
            loader.positions.end(self._number)
            raise
        moved = loader.move(batch)
        loader.position = position._replace(epoch=self._number)
        loader.positions.put(moved, loader.position)
        return moved


class _Counted:
    """Collates a stream's samples and says how many there were: worker processes end in short batches of their own."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), self._collate(samples)


class _Cut(Sampler[list[int]]):
    """Cuts each effective batch of a sampler into micro-batches, and says where each stands as it is handed out."""

    def __init__(self, sampler: Any, batch: Batch, drop_last: bool) -> None:
        self._sampler, self._batch, self._drop_last = sampler, batch, drop_last
        self.places: deque[Position] = deque()
        """Of what was handed out in the iteration that began last: workers ask ahead."""

    def __iter__(self) -> Iterator[list[int]]:
        self.places = deque()
        return self._iterate(self.places)

    def _iterate(self, places: deque[Position]) -> Iterator[list[int]]:
        step: list[int] = []
        for index in self._sampler:
            step.append(index)
            if len(step) == self._batch.num_samples:
                yield from self._pieces(step, places)
                step = []
        if step and not self._drop_last:
            yield from self._pieces(step, places)

    def _pieces(self, step: list[int], places: deque[Position]) -> Iterator[list[int]]:
        micro = self._batch.micro
        for start in range(0, len(step), micro):
            piece = step[start : start + micro]
            places.append(Position(len(piece), start + micro >= len(step)))
            yield piece

    def __len__(self) -> int:
        whole, tail = divmod(len(self._sampler), self._batch.num_samples)
        return whole * self._batch.accumulate + (0 if self._drop_last else -(-tail // self._batch.micro))


def _worker_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """DataLoader keywords without those that need workers where there are none, and the start method said aloud."""
    chosen = dict(options)
    if chosen.get("num_workers", 0) == 0:
        return {key: value for key, value in chosen.items() if key not in _WORKER_OPTIONS}
    start = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    chosen.setdefault("multiprocessing_context", start)
    return chosen


def to_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """A nested batch (dicts, tuples, lists, dataclasses, anything with ``.to``) with its tensors on ``device``."""
    if hasattr(batch, "to"):
        try:
            return batch.to(device, non_blocking=non_blocking)
        except TypeError:
            return batch.to(device)
    if isinstance(batch, Mapping):
        items = {key: to_device(value, device, non_blocking) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return items
        # A copy, since a defaultdict or a user's mapping is not built from a dict.
        copied = copy.copy(batch)
        copied.update(items)
        return copied
    if isinstance(batch, tuple):
        moved = [to_device(value, device, non_blocking) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, list):
        return [to_device(value, device, non_blocking) for value in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # A copy, since fields may be frozen, or no argument of the constructor.
        record = copy.copy(batch)
        for f in dataclasses.fields(batch):
            object.__setattr__(record, f.name, to_device(getattr(batch, f.name), device, non_blocking))
        return record
    return batch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nested batch, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for f in dataclasses.fields(batch):
            yield from tensors_in(getattr(batch, f.name))
