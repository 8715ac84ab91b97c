"""Puts a plan on an existing DataLoader, of any subclass."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from ..data.loader import worker_options
from ..data.worker_queues import handed_on
from ..errors import PlanError
from ..plan import Plan
from ..techniques.batch import BY_TOKENS
from .apply_pieces import apply_to_loader

OPTIONS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
"""DataLoader options that a plan may change."""
_HELD_BY_LOADER = 2
"""References to an iterator that no loop goes through: the loader's, and the count's own."""


def put_options(plan: Plan, loader: DataLoader[Any], device: torch.device | str) -> Callable[[], None]:
    """Put the loader's stage of a plan on a DataLoader in place, before it is first iterated over.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        loader: the training loader; its batches stay as they are.
        device: where batches go.

    Returns:
        What takes it off again, between two epochs.

    Raises:
        PlanError: the plan asks for what this loader cannot do.
    """
    wanted, stock = plan.settings.data_loading, dict(vars(loader))
    before = {name: getattr(loader, name) for name in OPTIONS}
    if isinstance(loader.dataset, IterableDataset) and (wanted.num_workers or 0) > max(1, before["num_workers"]):
        raise PlanError("data_loading: more workers would each read all of the script's iterable dataset.")
    if wanted.cache != "none" and loader.batch_sampler is None:
        raise PlanError("data_loading.cache: the script's DataLoader does not batch by itself.")
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    spec = apply_to_loader(plan, loader.dataset, collate=collate, options=before, device=device)
    options = {"prefetch_factor": None, "persistent_workers": False, **worker_options(spec.options)}
    start = options.pop("multiprocessing_context", None)
    if options.get("num_workers"):
        options["prefetch_factor"] = options["prefetch_factor"] or 2
    else:
        options["timeout"] = 0
    loader.__dict__.update(options)  # torch refuses to have some of them set, for the sampler may have read them
    if start is not None and loader.multiprocessing_context is None:
        loader.multiprocessing_context = start
    if spec.dataset is not loader.dataset:
        loader.__dict__["dataset"] = spec.dataset
    if spec.collate is not collate:
        loader.collate_fn = spec.collate or default_collate

    known = weakref.ref(loader)  # whoever can take it off does not keep it

    def take_off() -> None:
        if (own := known()) is not None:
            changed = {name: value for name, value in stock.items() if vars(own)[name] is not value}
            vars(own).update(changed, _iterator=None)

    return take_off


@contextmanager
def begun_as_stock(loader: DataLoader[Any], keeps: bool) -> Iterator[None]:
    """Have a DataLoader begin a next epoch within the block as it would without the plan: with as many random numbers
    drawn, of which the seed of new workers takes one; and also while another epoch goes on, which keeps its workers. An
    epoch that has ended hands them on, though a loop may hold it still.

    Args:
        loader: with the plan's row, or as it is once that was taken off.
        keeps: whether the script's own workers stay, so that a next epoch starts none.
    """
    if not keeps and loader._iterator is not None and sys.getrefcount(loader._iterator) > _HELD_BY_LOADER:
        loader._iterator = handed_on(loader._iterator)
    starts, generator = loader._iterator is None, loader.generator
    if not starts and not keeps:
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    elif starts and keeps and (loader.persistent_workers or not loader.num_workers):
        loader.generator = torch.Generator().set_state((generator or torch.default_generator).get_state())
    try:
        yield
    finally:
        loader.generator = generator


def changed_loader(plan: Plan, loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of a DataLoader with a plan's micro-batch; order, collation and class stay the user's.

    Args:
        plan: as read by :func:`autotune.load_plan`.
        loader: the training loader as the user built it, which stays as it is.

    Raises:
        PlanError: the plan asks for what this loader cannot do.
    """
    changed = copy.copy(loader)
    changed.__dict__["_iterator"] = None
    _put_batch(plan, changed)
    return changed


def _put_batch(plan: Plan, loader: DataLoader[Any]) -> None:
    batch = plan.settings.batch
    if batch is None:
        return
    if batch.tokens is not None:
        raise PlanError(f"settings.{BY_TOKENS} Train by autotune.apply, or leave tokens out.")
    sampler = loader.batch_sampler
    if getattr(sampler, "batch_size", None) == batch.micro:
        return
    if has_own_batches(loader):
        got = "makes its batches in the dataset (batch_size=None)" if sampler is None else f"has {_named(sampler)}"
        raise PlanError(
            f"settings.batch.micro: the plan trains on micro-batches of {batch.micro}, but the training DataLoader "
            f"{got}, whose batches cannot be made so. Make batches of {batch.micro} there."
        )
    _put_size(loader, batch.micro)


def has_own_batches(loader: Any) -> bool:
    """Whether it makes its batches in a way of its own, so that others cannot be made of its samples."""
    return not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler


def rebatched(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """A copy of a DataLoader that makes batches of another size; all else stays the user's."""
    changed = copy.copy(loader)
    changed.__dict__["_iterator"] = None
    _put_size(changed, batch_size)
    return changed


def _put_size(loader: Any, size: int) -> None:
    drop_last = loader.batch_sampler.drop_last
    loader.__dict__.update(batch_sampler=BatchSampler(loader.sampler, size, drop_last), batch_size=size)


def _named(sampler: Any) -> str:
    size = getattr(sampler, "batch_size", None)
    return f"a batch sampler of its own ({type(sampler).__name__}{'' if size is None else f', batches of {size}'})"
