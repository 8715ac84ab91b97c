"""The loaders that a script trains on: which of them a plan's row is put on, and what ends that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ...data.sameness import Sameness
from ...data.worker_queues import hold_queues
from ...plan import Plan
from ...techniques.support.facts import ReadLoader
from .loader_row import LoaderRow


class _Known(LoaderRow):
    """One that was iterated over with gradients on."""

    def __init__(self, plan: Plan, loader: Any, place: int) -> None:
        super().__init__(plan, loader, plan.budget.device or "cpu")
        self.place = place

    def named(self) -> ReadLoader:
        """What it is recognised by."""
        try:
            length = len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = None
        return ReadLoader(place=self.place, dataset=type(self.dataset).__name__, length=length)


class Loaders:
    """Puts the row of data loading on those that it was found for, and watches their datasets at each epoch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._row = plan.settings.data_loading
        self._known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
        self._places: list[Callable[[Any], bool]] = []
        """Whether another dataset is one of theirs, in the order in which they were first read."""
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
        return self._known[loader].watch()

    def is_deterministic(self, loader: Any) -> bool:
        """Whether its dataset gives the same when it is read again."""
        return self._known[loader].why_no_cache() is None

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
            self._known[loader] = known = _Known(self._plan, loader, self._place_of(loader.dataset))
            if self._is_meant(known, is_named):
                put(lambda: self._put_on(loader, known))
        else:
            self.go_on(loader)

    def go_on(self, loader: Any) -> None:
        """A next epoch of a loader that may have the row: it goes on without where its dataset is another now."""
        if (known := self._known.get(loader)) is not None:
            known.go_on()

    def begin(self, loader: Any, begin: Callable[[Any], Any]) -> Any:
        """The iterator of an epoch, as torch makes it; what that draws is what the script's own would."""
        known = self._known.get(loader)
        if known is not None:
            return known.begin(loader, begin)
        iterator = begin(loader)
        hold_queues(iterator)
        return iterator

    def _place_of(self, dataset: Any) -> int:
        known = next((place for place, is_it in enumerate(self._places) if is_it(dataset)), None)
        if known is None:
            known = len(self._places)
            self._places.append(_recognised(dataset))
        return known

    def _is_meant(self, known: _Known, is_named: bool) -> bool:
        """Whether the row is for this loader: the plan says for which, unless it was written by hand."""
        wants = bool(self._row.model_dump(exclude_defaults=True))
        return wants and (is_named or not self._meant or known.named() in self._meant)

    def _put_on(self, loader: Any, known: _Known) -> None:
        known.put_on(loader)
        self.is_in_force = self.is_in_force or known.is_on


def _recognised(dataset: Any) -> Callable[[Any], bool]:
    """Whether another is this dataset, which is not kept: a script may make one anew for each evaluation. What cannot
    be referred to weakly, such as a list, is known by its address."""
    try:
        known = weakref.ref(dataset)
    except TypeError:
        address = id(dataset)
        return lambda other: id(other) == address
    return lambda other: other is not None and known() is other
