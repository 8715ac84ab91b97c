"""``Loader``: micro-batches on the device, cut so that optimizer steps see whole effective batches."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
from collections.abc import Iterator, Mapping, MutableMapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from .cut import Counted, Cut, advanced
from .errors import PlanError, TaskError
from .positions import Position, Positions, Start
from .randomness import random_state, set_random_state, undisturbed
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
        self._cut: Cut | None = None
        self._start: Start | None = None
        """What the running epoch began from; None once it has ended."""
        self._resumed: tuple[Start | None, int] | None = None
        """What the next iteration goes on in, and its place, if it is to go on in one."""
        options = _worker_options(spec.options)
        if isinstance(spec.dataset, IterableDataset):
            if batch.effective is not None:
                raise PlanError(
                    f"settings.batch.effective: an iterable dataset is read in equal micro-batches of {batch.micro}, "
                    f"but got {batch.effective} samples in {batch.accumulate} of them. Use a micro that divides it."
                )
            counted = Counted(spec.collate or default_collate)
            self._data: DataLoader[Any] = DataLoader(
                spec.dataset, batch_size=batch.micro, collate_fn=counted, **options
            )
        else:
            if len(spec.dataset) == 0:
                raise TaskError("build_dataset returned an empty dataset. Training needs at least one sample.")
            self._cut = Cut(sampler, batch, options.pop("drop_last", False))
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

    def begin(self) -> tuple[Start, Iterator[tuple[Any, Position]]]:
        """Start an epoch, or go on in one that a :meth:`load_state_dict` told of: what it began from, and its batches
        before they are moved.

        Raises:
            TaskError: the epoch that was told of ends before the place that it was left at.
        """
        had_workers = self._resumed is not None and self.epoch > 0 and self._data.persistent_workers
        start, place = self._resumed or (None, 0)
        self._resumed = None
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        self.positions.begin(self.epoch)
        self._start = start or Start(random_state(), self._order())
        if start is None:
            return self._start, self._iterate(had_workers)
        with undisturbed():
            self._set_order(start.order)
            set_random_state(start.random)
            return start, self._advance(self._iterate(had_workers), place)

    def end(self, number: int) -> None:
        """An iteration has yielded its last batch."""
        if number == self.epoch:
            self._start = None
        self.positions.end(number)

    def where(self, done: Position | None) -> tuple[int, int, Start | None]:
        """Where a training stands: the epoch, from 0, the micro-batches of it that are done, and, where it has begun,
        what from. Batches that a loop has fetched ahead are not done; an epoch that a loop has left is not over.

        Args:
            done: the micro-batch trained on last.
        """
        if self._resumed is not None:
            start, place = self._resumed
            return self.epoch, place, start
        if held := self.positions.after(done):
            return held.epoch - 1, held.place, held.start
        if self._start is None:
            return self.epoch, 0, None
        return self.epoch - 1, done.place + 1 if done and done.epoch == self.epoch else 0, self._start

    def state_dict(self, done: Position | None) -> dict[str, Any]:
        """Where a training stands, and what the order of samples comes from."""
        epoch, place, start = self.where(done)
        return {
            "epoch": epoch,
            "place": place,
            "random": start and start.random,
            "order": start.order if start else self._order(),
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the next iteration begins at that place."""
        self.positions.clear()
        self._start, self.position = None, None
        self.epoch = state["epoch"]
        self._set_order(state["order"])
        start = None if state["random"] is None else Start(state["random"], state["order"])
        self._resumed = start, state["place"]

    def _generators(self) -> list[torch.Generator]:
        own = (getattr(self._sampler, "generator", None), self.spec.options.get("generator"))
        return [generator for generator in own if isinstance(generator, torch.Generator)]

    def _order(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_order(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state.cpu())

    def _iterate(self, had_workers: bool) -> Iterator[tuple[Any, Position]]:
        data = self._data
        generator = data.generator
        if had_workers:  # persistent ones were seeded once; nothing is drawn for those that take their place
            data.generator = torch.Generator()
        try:
            batches = iter(data)
        finally:
            data.generator = generator
        return self._iterate_stream(batches) if self._cut is None else self._iterate_map(self._cut, batches)

    def _advance(self, batches: Iterator[tuple[Any, Position]], place: int) -> Iterator[tuple[Any, Position]]:
        """Workers, and streams, read again what was trained on: what they draw, and keep, goes with that."""
        try:
            if self._cut is None or self._data.num_workers:
                return advanced(batches, place)
            self._cut.pieces.advance(place)
            return batches
        except EOFError as error:
            raise TaskError(
                f"the epoch that is resumed has {error.args[0]} micro-batches, but {place} of it were trained on. "
                "Give the data that the state was saved with."
            ) from None

    def move(self, batch: Any) -> Any:
        """A batch on the device."""
        return to_device(batch, self.device, self._non_blocking)

    def _iterate_map(self, cut: Cut, batches: Iterator[Any]) -> Iterator[tuple[Any, Position]]:
        pieces = cut.pieces  # this iteration's own

        def with_place(batch: Any) -> tuple[Any, Position]:
            if pieces is not cut.pieces and self._data.persistent_workers:
                raise TaskError(
                    "training.loader was iterated anew, and its persistent workers serve one iteration at a time. "
                    "End one before the next begins, or set persistent_workers to false."
                )
            return batch, pieces.places.popleft()

        return map(with_place, batches)

    def _iterate_stream(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Position]]:
        """One batch behind the stream, so that the last one is known to end its step."""
        place, held = -1, None
        for place, (num_samples, batch) in enumerate(batches):
            if held is not None:
                yield held[1], Position(held[0], place % self.batch.accumulate == 0, place=place - 1)
            held = num_samples, batch
        if held is None:
            raise TaskError("build_dataset returned an empty dataset. Training needs at least one sample.")
        yield held[1], Position(held[0], ends_step=True, place=place)


class _Epoch(Iterator[Any]):
    """One iteration over a loader; like a DataLoader's own it keeps no batch that it has yielded."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._batches: Iterator[tuple[Any, Position]] | None = None
        self._number = 0
        self._start: Start | None = None

    def __next__(self) -> Any:
        loader = self._loader
        if self._batches is None:
            self._start, self._batches = loader.begin()
            self._number = loader.epoch
        try:
            batch, position = next(self._batches)
        except StopIteration:
            loader.end(self._number)
            raise
        moved = loader.move(batch)
        loader.position = position._replace(epoch=self._number, start=self._start)
        loader.positions.put(moved, loader.position)
        return moved


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
