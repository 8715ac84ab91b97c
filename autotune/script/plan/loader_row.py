"""A plan's row of data loading on one DataLoader: put on before an epoch, watched at each next, and taken off where the
dataset is another by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ...data.sameness import Sameness, reads_alike
from ...data.worker_draws import WorkerDraws
from ...data.worker_queues import hold_queues
from ...errors import Caught
from ...plan import Plan
from ...training.data_loader import begun_as_stock, put_options
from ..refusal import tell_once


class LoaderRow:
    """Of a loader as the user built it, which it is put on in place."""

    def __init__(self, plan: Plan, loader: DataLoader[Any], device: torch.device | str) -> None:
        """
        Args:
            plan: as read by :func:`autotune.load_plan`.
            loader: any, with nothing put on it.
            device: where batches go.
        """
        self._plan, self._device, self._row = plan, device, plan.settings.data_loading
        self.dataset = loader.dataset
        """The user's."""
        self._collate = None if loader.collate_fn is default_collate else loader.collate_fn
        self._own_workers, self._own_keeps = loader.num_workers, loader.persistent_workers
        self._draws: WorkerDraws | None = None
        self.is_on = self._has_begun = False
        """Whether it was put on, and whether the loader has begun an epoch with that."""
        self._sameness: Sameness | None = None
        """Of the dataset, where the row rests on that."""
        self._take_off: Callable[[], None] = lambda: None

    def put_on(self, loader: DataLoader[Any]) -> None:
        """Before the loader's first epoch. An epoch that is not the same again is not cached, and that is said.

        Raises:
            PlanError: the plan asks for what this loader cannot do.
        """
        if self._row.cache != "none" and (reason := self.why_no_cache()) is not None:
            tell_once(f"data_loading: an epoch of {type(self.dataset).__name__} is not cached: {reason}.")
            return
        self._take_off = put_options(self._plan, loader, self._device)
        self.is_on = True
        if replaced := self._row.replaced_workers(self._own_workers, isinstance(self.dataset, IterableDataset)):
            self._draws = WorkerDraws(replaced, self._own_keeps)
        if self._row.cache != "none" or (loader.persistent_workers and not self._own_keeps):
            self._sameness = self.watch(reads=self._row.cache != "none")

    def go_on(self) -> None:
        """Before a next epoch: it goes on without the row where its dataset is another now."""
        if self._sameness is None or (change := self._sameness.change()) is None:
            return
        self._take_off()
        self._sameness = None
        what = "its epoch is no longer cached" if self._row.cache != "none" else "its workers are no longer kept"
        tell_once(f"data_loading: {what}, from this epoch on: {type(self.dataset).__name__}: {change}.")

    def begin(self, loader: DataLoader[Any], begin: Callable[[DataLoader[Any]], Any]) -> Iterator[Any]:
        """The iterator of an epoch, as torch makes it: what is drawn is what the user's own would draw."""
        with begun_as_stock(loader, self._own_keeps) if self._has_begun else nullcontext():
            iterator: Iterator[Any] = begin(loader)
        self._has_begun = self.is_on
        hold_queues(iterator)
        if self._draws is not None:
            self._draws.begin(iterator)
        return iterator

    def watch(self, reads: bool = True) -> Sameness:
        """The dataset as it is now."""
        return Sameness(self.dataset, self._collate, reads=reads)

    def why_no_cache(self) -> str | None:
        """Why an epoch of the dataset may not be kept, by what it gives now; of a stream, the row itself says so."""
        if isinstance(self.dataset, IterableDataset):
            return None
        with Caught() as raised:  # a user's dataset may raise anything at what it was not written for
            repeats = reads_alike(self.dataset, self._collate or default_collate)
        if (error := raised.error) is not None:
            return f"no sample of it can be read alone ({type(error).__name__}: {error})"
        if not repeats:
            return "it draws random numbers or returns other values when it is read again (augmentation)"
        return self.watch().change()
