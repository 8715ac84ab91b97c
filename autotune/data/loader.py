"""``Loader``: micro-batches on the device, cut so that optimizer steps see whole effective batches."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ..device_memory import cap
from ..errors import PlanError, TaskError
from ..nested import to_device
from ..randomness import random_state, set_random_state, undisturbed
from ..ranks import ALONE, Ranks
from ..techniques import LoaderSpec
from ..techniques.batch import Batch
from .cut import Counted, Cut, advanced
from .own_loader import OwnLoader, samples_of
from .positions import Position, Positions, Start
from .sameness import Sameness
from .token_batches import TokenCut
from .worker_draws import WorkerDraws
from .worker_queues import hold_queues

EMPTY = "build_dataset returned an empty dataset. Training needs at least one sample."
_WORKER_OPTIONS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


class Loader:
    """A DataLoader over one :class:`Batch`: yields micro-batches on the device, and knows each one's place.

    A short tail of the dataset forms a smaller optimizer step of its own, unless the user's loader drops it.
    """

    def __init__(self, spec: LoaderSpec, batch: Batch, sampler: Any, ranks: Ranks = ALONE) -> None:
        """
        Args:
            spec: dataset, collate, options and device; lengths, where the batch is in tokens.
            batch: how an optimizer step, of all ranks, is cut into micro-batches.
            sampler: indices of a map-style dataset, the same in every rank; None for an iterable one.
            ranks: which of several this is.

        Raises:
            TaskError: the dataset is empty.
            PlanError: an iterable dataset cannot be cut into uneven micro-batches, nor between ranks, nor by length.
        """
        self.batch = ranks.shares[ranks.rank] if ranks.shares else batch.share(ranks.size)
        """This rank's share of an optimizer step."""
        self.ranks = ranks
        self.spec = spec
        self.device = spec.device
        self.position: Position | None = None
        """Position of the micro-batch yielded last."""
        self.positions = Positions()
        """Positions of those that were yielded and not yet trained on."""
        self.epoch = 0
        self.on_arrival: Callable[[], Any] | None = None
        """Called when a batch is there, before it is moved to the device."""
        self._sampler = sampler
        self._cut: Cut | None = None
        self._start: Start | None = None
        """State at the start of the running epoch; None once it has ended."""
        self._resumed: tuple[Start | None, int] | None = None
        """Epoch's start and position that the next iteration resumes from; None if it begins an epoch."""
        self._sameness: Sameness | None = None
        """Of the dataset since the last epoch, where what was done to its loading rests on that."""
        self._draws = (
            WorkerDraws(spec.replaced_workers, bool(spec.options.get("persistent_workers")))
            if spec.replaced_workers
            else None
        )
        options = worker_options(spec.options)
        if isinstance(spec.dataset, OwnLoader) and options:
            raise PlanError(
                "settings.data_loading: the task builds its loaders itself (build_loader), but got "
                f"{', '.join(sorted(options))}. Leave data_loading out of the plan, and set them there."
            )
        if isinstance(spec.dataset, IterableDataset):
            if ranks.size > 1:
                raise PlanError(
                    "settings.parallel: every process would read the same samples of an iterable dataset, or of a "
                    f"loader of the task's own, but the plan is for {ranks.size} processes. Give a map-style dataset, "
                    "which is shared out here, or use one process."
                )
            if batch.tokens is not None:
                raise PlanError(
                    "settings.batch.tokens: an iterable dataset, or a loader of the task's own, is read in the order "
                    "that it has, and the lengths of its samples are not known before. Give a map-style dataset, or "
                    "leave tokens out."
                )
            if batch.effective is not None:
                raise PlanError(
                    "settings.batch.effective: an iterable dataset, or a loader of the task's own, is read in equal "
                    f"micro-batches of {batch.micro}, but got {batch.effective} samples in {batch.accumulate} of them. "
                    "Use a micro that divides it."
                )
        else:
            if len(spec.dataset) == 0:
                raise TaskError(EMPTY)
            drops = options.pop("drop_last", False)
            self._cut = (
                Cut(sampler, batch, drops, ranks)
                if batch.tokens is None or spec.lengths is None
                else TokenCut(sampler, batch, drops, spec.lengths, ranks)
            )
        self._options = options

    @cached_property
    def _data(self) -> Any:
        """The iterable that yields batches: a DataLoader, or the task's own."""
        spec = self.spec
        if isinstance(spec.dataset, OwnLoader):
            return spec.dataset.of(self.batch.micro)
        if self._cut is not None:
            return DataLoader(spec.dataset, batch_sampler=self._cut, collate_fn=spec.collate, **self._options)
        counted = Counted(spec.collate or default_collate)
        return DataLoader(spec.dataset, batch_size=self.batch.micro, collate_fn=counted, **self._options)

    def __len__(self) -> int:
        """Micro-batches in one epoch of this rank."""
        return len(self._data)

    @property
    def options(self) -> dict[str, Any]:
        """Settings of the underlying DataLoader that affect its speed."""
        stock = {"num_workers": 0, "prefetch_factor": None, "pin_memory": False, "persistent_workers": False}
        return {name: getattr(self._data, name, default) for name, default in stock.items()}

    @property
    def num_samples(self) -> int | None:
        """Samples in one epoch, of all ranks; None for an iterable dataset without a length."""
        if isinstance(self.spec.dataset, OwnLoader):
            return samples_of(self._data)
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
        had_workers = self._resumed is not None and self.epoch > 0 and self.options["persistent_workers"]
        start, place = self._resumed or (None, 0)
        self._resumed = None
        self._watch()
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

    def _watch(self) -> None:
        """Read the dataset as the user would from here on, if it is another than in the last epoch."""
        stock = self.spec.stock
        if stock is None or isinstance(stock.dataset, IterableDataset):
            return
        if self._sameness is None:
            self._sameness = Sameness(stock.dataset, reads=False)
        elif (change := self._sameness.change()) is not None:
            self.spec, self._options = stock, worker_options(stock.options)
            self._options.pop("drop_last", None)
            vars(self).pop("_data", None)
            warnings.warn(
                "data_loading: no epoch is cached and no workers are kept from here on: "
                f"{type(stock.dataset).__name__}: {change}.",
                stacklevel=4,
            )

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
        """The position in the epoch, and the state that the order of samples comes from."""
        epoch, place, start = self.where(done)
        return {
            "epoch": epoch,
            "place": place,
            "random": start and start.random,
            "order": start.order if start else self._order(),
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume: the next iteration begins at the saved position."""
        self.positions.clear()
        self._start, self.position = None, None
        self.epoch = state["epoch"]
        self._set_order(state["order"])
        start = None if state["random"] is None else Start(state["random"], state["order"])
        self._resumed = start, state["place"]

    def _generators(self) -> list[torch.Generator]:
        sampler = getattr(self._data, "sampler", None) if self._cut is None else self._sampler
        found = (getattr(one, "generator", None) for one in (sampler, self._data))
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    def _order(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_order(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state.cpu())

    def _iterate(self, had_workers: bool) -> Iterator[tuple[Any, Position]]:
        goes_on = had_workers or (self._draws is not None and self._draws.go_on)
        with _seeded_apart(self._data) if goes_on else nullcontext():
            batches = iter(self._data)
        hold_queues(batches)
        if self._draws is not None:
            self._draws.begin(batches)
        if self._cut is not None:
            return self._iterate_map(self._cut, batches)
        dataset = self.spec.dataset
        return self._iterate_stream(
            dataset.counted(batches, self.batch.micro) if isinstance(dataset, OwnLoader) else batches
        )

    def _advance(self, batches: Iterator[tuple[Any, Position]], place: int) -> Iterator[tuple[Any, Position]]:
        """Read again, in workers and iterable datasets, what was trained on, so that their random draws continue."""
        try:
            if self._cut is None or self._data.num_workers or self._draws is not None:
                return advanced(batches, place)
            self._cut.pieces.advance(place)
            return batches
        except EOFError as error:
            raise TaskError(
                f"the epoch that is resumed has {error.args[0]} micro-batches, but {place} of it were trained on. "
                "Give the data that the state was saved with."
            ) from None

    def batch_of(self, places: Sequence[int]) -> Any:
        """The batch of these samples of a map-style dataset, before it is moved to the device."""
        stock = self.spec.stock or self.spec
        return (stock.collate or default_collate)([stock.dataset[place] for place in places])

    def move(self, batch: Any) -> Any:
        """Move a batch to the device."""
        return to_device(batch, self.device, self.options["pin_memory"])

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
        """Yield one batch behind the dataset, so that the last one is known to end its step."""
        place, held = -1, None
        for place, (num_samples, batch) in enumerate(batches):
            if held is not None:
                yield held[1], Position(held[0], place % self.batch.accumulate == 0, place=place - 1)
            held = num_samples, batch
        if held is None:
            raise TaskError(EMPTY)
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
        if loader.on_arrival is not None:
            loader.on_arrival()
        cap.batch_comes(batch)
        moved = loader.move(batch)
        loader.position = position._replace(epoch=self._number, start=self._start)
        loader.positions.put(moved, loader.position)
        return moved


@contextmanager
def _seeded_apart(data: DataLoader[Any]) -> Iterator[None]:
    """Let workers be seeded without drawing from the global generator, as persistent workers are after an epoch."""
    generator, data.generator = data.generator, torch.Generator()
    try:
        yield
    finally:
        data.generator = generator


def worker_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """DataLoader keywords, without those that need workers if there are none, and with an explicit start method."""
    chosen = dict(options)
    if chosen.get("num_workers", 0) == 0:
        return {key: value for key, value in chosen.items() if key not in _WORKER_OPTIONS}
    start = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    chosen.setdefault("multiprocessing_context", start)
    return chosen
