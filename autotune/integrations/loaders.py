"""Training loaders of frameworks: a plan's row of data loading is put on each as its first epoch begins, and watched
from then on, as in an unedited script."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from ..errors import PlanError
from ..plan import Plan
from ..randomness import undisturbed
from ..script.plan.loader_row import LoaderRow
from ..script.plan.patches import patch
from ..script.refusal import tell_once
from ..training.launched import stand_aside

_ROW = "_autotune_row"
_unmet: weakref.WeakSet[_Row] = weakref.WeakSet()
"""Those whose loaders have begun no epoch, before any optimizer step."""


class _Row(LoaderRow):
    """That of a loader, and not of a copy of it."""

    def __init__(self, plan: Plan, loader: DataLoader[Any], device: torch.device | str) -> None:
        super().__init__(plan, loader, device)
        self.loader, self._is_met = loader, False
        self.is_late = False
        """Whether an optimizer has stepped before the loader's first epoch."""
        _unmet.add(self)

    def begun(self, begin: Callable[[DataLoader[Any]], Any]) -> Iterator[Any]:
        """An epoch that torch begins, with the row where that can be."""
        if not self._is_met and not self.loader.num_workers:
            return self._begun_later(begin)
        self._look()
        return self.begin(self.loader, begin)

    def _look(self) -> None:
        """At the dataset, before an epoch."""
        if self._is_met:
            self.go_on()
            return
        self._is_met = True
        _unmet.discard(self)
        try:
            with undisturbed():
                self.put_on(self.loader)
        except PlanError as error:
            if not self.is_late:
                raise
            tell_once(f"{error} The loader is left as it is.")  # a job that trains is not ended

    def _begun_later(self, begin: Callable[[DataLoader[Any]], Any]) -> Iterator[Any]:
        """With its first batch, when a loader without workers first reads its dataset: Lightning makes the iterator
        before the job's ``on_train_epoch_start``. The seed of workers is drawn at once."""
        own = self.loader.generator
        drawn = torch.Generator().set_state((own or torch.default_generator).get_state())
        torch.empty((), dtype=torch.int64).random_(generator=own)

        def read() -> Iterator[Any]:
            self._look()
            self.loader.generator = drawn
            try:
                iterator = self.begin(self.loader, begin)
            finally:
                self.loader.generator = own
            yield from iterator

        return read()


def put_at_first_epoch(plan: Plan, loader: Any, device: torch.device | str) -> None:
    """Have the row of data loading put on a DataLoader once it is iterated over. Its dataset may have changed by then:
    frameworks tell it the epoch.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        loader: the one that torch iterates over, and none that wraps it; changed in place.
        device: where batches go.

    Raises:
        PlanError: it is no torch DataLoader.
    """
    stand_aside()
    if not plan.settings.affect("loader"):
        return
    if not isinstance(loader, DataLoader):
        raise PlanError(
            f"settings.data_loading: it is for a torch DataLoader, but the training loader is a "
            f"{type(loader).__name__}. Use a DataLoader, or leave the row out."
        )
    _watch_loaders()
    if (found := vars(loader).get(_ROW)) is None or found.loader is not loader:
        vars(loader)[_ROW] = _Row(plan, loader, device)


@functools.cache
def _watch_loaders() -> None:
    patch(DataLoader, "__iter__", _begin)
    register_optimizer_step_post_hook(_stepped)


def _stepped(*_: Any) -> None:
    for row in _unmet:
        row.is_late = True
    _unmet.clear()


def _begin(original: Callable[..., Any], loader: Any) -> Any:
    row: _Row | None = vars(loader).get(_ROW)
    if row is None or row.loader is not loader:
        return original(loader)
    return row.begun(original)
