"""The loaders that a script trains on: which of them a plan's row is put on, and what ends that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from ..data.sameness import Sameness, reads_alike
from ..plan import Plan
from ..techniques.facts import ReadLoader
from ..training.data_loader import begun_as_stock, put_options
from .applied import tell_once

__all__ = ["Loaders"]


class _Known:
    """One that was iterated over with gradients on."""

    def __init__(self, loader: Any, place: int) -> None:
        self.dataset, self.place = loader.dataset, place
        self.collate = None if loader.collate_fn is default_collate else loader.collate_fn
        self.own_keeps = loader.persistent_workers
        """Whether its workers are kept between epochs by the script."""
        self.has_row = self.has_begun = False
        """Whether the plan's row was put on it, and whether it has begun an epoch with that."""
        self.sameness: Sameness | None = None
        """Of its dataset, where the plan's row rests on that."""
        self.take_off: Callable[[], None] = lambda: None

    def named(self) -> ReadLoader:
        """What it is recognised by."""
        try:
            length = len(self.dataset)
        except (TypeError, NotImplementedError):
            length = None
        return ReadLoader(place=self.place, dataset=type(self.dataset).__name__, length=length)


class Loaders:
    """Puts the row of data loading on those that it was found for, and watches their datasets at each epoch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._row = plan.settings.data_loading
        self._known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
        self._places: list[Any] = []
        """Their datasets, in the order in which they were first read."""
        self.is_in_force = False
        """Whether the row is on one of them."""
        identity = plan.task.identity if plan.task is not None else None
        self._meant = (identity.loaders if identity is not None else None) or ()
        """For which it was found; none of a plan that was written by hand."""

    def named(self, loader: Any) -> ReadLoader | None:
        """What a loader is recognised by; None of one that was not iterated over to train."""
        known = self._known.get(loader)
        return None if known is None else known.named()

    def in_order(self, loaders: Sequence[Any]) -> list[Any]:
        """Loaders in the order in which they were first read."""
        return sorted((one for one in loaders if one in self._known), key=lambda one: self._known[one].place)

    def watch(self, loader: Any) -> Sameness:
        """A loader's own dataset, as it is now."""
        known = self._known[loader]
        return Sameness(known.dataset, known.collate)

    def is_deterministic(self, loader: Any) -> bool:
        """Whether its dataset gives the same when it is read again."""
        return _why_no_cache(self._known[loader]) is None

    def is_first(self, loader: Any) -> bool:
        """Whether the plan says that this is the first of the loaders that are trained on."""
        return loader is not None and self._meant[:1] == (self.named(loader),)

    def begin_epoch(self, loader: Any, put: Callable[[Callable[[], None]], Any], is_named: bool) -> None:
        """A loader is about to be iterated over to train, or what may be that.

        Args:
            loader: any.
            put: calls what it is given, as a part of the plan that is applied.
            is_named: whether the script names it as the one to train on.
        """
        known = self._known.get(loader)
        if known is None:
            self._known[loader] = known = _Known(loader, self._place_of(loader.dataset))
            if self._is_meant(known, is_named):
                put(lambda: self._put_on(loader, known))
        else:
            self.go_on(loader)

    def go_on(self, loader: Any) -> None:
        """A next epoch of a loader that may have the row: it goes on without where its dataset is another now."""
        known = self._known.get(loader)
        if known is None or known.sameness is None:
            return
        if (change := known.sameness.change()) is None:
            return
        known.take_off()
        known.sameness = None
        what = "its epoch is no longer cached" if self._row.cache != "none" else "its workers are no longer kept"
        tell_once(f"data_loading: {what}, from this epoch on: {type(known.dataset).__name__}: {change}.")

    @contextmanager
    def beginning(self, loader: Any) -> Iterator[None]:
        """The iterator of an epoch is made within the block; what that draws is what the script's own would."""
        known = self._known.get(loader)
        if known is None or not known.has_row:
            yield
            return
        with begun_as_stock(loader, known.own_keeps) if known.has_begun else nullcontext():
            yield
        known.has_begun = True

    def _place_of(self, dataset: Any) -> int:
        if all(dataset is not one for one in self._places):
            self._places.append(dataset)
        return next(place for place, one in enumerate(self._places) if one is dataset)

    def _is_meant(self, known: _Known, is_named: bool) -> bool:
        """Whether the row is for this loader: the plan says for which, unless it was written by hand."""
        wants = bool(self._row.model_dump(exclude_defaults=True))
        return wants and (is_named or not self._meant or known.named() in self._meant)

    def _put_on(self, loader: Any, known: _Known) -> None:
        if self._row.cache != "none" and (reason := _why_no_cache(known)) is not None:
            tell_once(f"data_loading: an epoch of {type(known.dataset).__name__} is not cached: {reason}.")
            return
        known.take_off = put_options(self._plan, loader, self._plan.budget.device or "cpu")
        self.is_in_force = known.has_row = True
        if self._row.cache != "none" or (loader.persistent_workers and not known.own_keeps):
            known.sameness = Sameness(known.dataset, known.collate, reads=self._row.cache != "none")


def _why_no_cache(known: _Known) -> str | None:
    """Why an epoch of this dataset may not be kept, by what it gives now; of a stream, the row itself says so."""
    if isinstance(known.dataset, IterableDataset):
        return None
    try:
        repeats = reads_alike(known.dataset, known.collate or default_collate)
    except Exception as error:  # noqa: BLE001 - a user's dataset may raise anything at what it was not written for
        return f"no sample of it can be read alone ({type(error).__name__}: {error})"
    if not repeats:
        return "it draws random numbers or returns other values when it is read again (augmentation)"
    return Sameness(known.dataset, known.collate).change()
