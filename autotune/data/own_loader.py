"""``OwnLoader``: wraps a task's ``build_loader``, with one loader for each size of micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from ..errors import TaskError
from ..nested import tensors_in

_ROWS = 16
"""Batch size at which samples are read."""


class OwnLoader(IterableDataset[Any]):
    """As a dataset, it is a stream of the samples that its batches are made of: the first dimension of their tensors.

    That is what a task is inspected by; training takes the batches as they are.
    """

    def __init__(self, build: Callable[[int], Any], where: str) -> None:
        """
        Args:
            build: the task's ``build_loader``.
            where: the task's file, for messages.
        """
        self._build, self._where = build, where

    def of(self, micro: int) -> Any:
        """The user's loader for micro-batches of so many samples.

        Raises:
            TaskError: it cannot be iterated over epoch after epoch.
        """
        loader = self._build(micro)
        if isinstance(loader, Iterator):
            raise TaskError(
                f"{self._where}: build_loader({micro}) returned an iterator ({type(loader).__name__}), which ends with "
                "its first epoch. Return what can be iterated again, such as a torch.utils.data.DataLoader."
            )
        if not isinstance(loader, Iterable):
            raise TaskError(
                f"{self._where}: build_loader({micro}) returned {type(loader).__name__}, which is not iterable. Return "
                "a torch.utils.data.DataLoader, or another iterable of batches."
            )
        return loader

    def counted(self, loader: Any, micro: int) -> Iterator[tuple[int, Any]]:
        """An epoch's batches, and how many samples each holds.

        Raises:
            TaskError: there is none, or one that is not the last holds another number of samples.
        """
        num_samples = None
        for batch in loader:
            if num_samples is not None and num_samples != micro:
                raise self._other_size(micro, num_samples)
            num_samples = _num_samples(batch, micro)
            if num_samples > micro:
                raise self._other_size(micro, num_samples)
            yield num_samples, batch
        if num_samples is None:
            raise TaskError(
                f"{self._where}: build_loader({micro}) returned a loader without a batch. Training needs at least one."
            )

    def check_size(self, micro: int) -> None:
        """Read a batch of so many samples.

        Raises:
            TaskError: there is none, or one of another size.
        """
        next(self.counted(self.of(micro), micro))

    def _other_size(self, micro: int, found: int) -> TaskError:
        return TaskError(
            f"{self._where}: build_loader({micro}) must yield batches of {micro} samples, the first dimension of their "
            f"tensors, of which only the last may hold fewer; but it yielded one of {found}. Pass batch_size on to the "
            "DataLoader."
        )

    def num_samples(self) -> int | None:
        """In an epoch; None where the loader does not say."""
        loader = self.of(1)
        if isinstance(loader, Sized) and not isinstance(loader, DataLoader):
            return len(loader)
        return samples_of(loader)

    def __iter__(self) -> Iterator[Any]:
        micro = min(_ROWS, self.num_samples() or _ROWS)  # an epoch may have fewer samples, and drop them
        for num_samples, batch in self.counted(self.of(micro), micro):
            yield from self._rows(batch, num_samples)

    def _rows(self, batch: Any, num_samples: int) -> Iterator[Any]:
        leaves, structure = tree_flatten(batch)
        is_cut = [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == num_samples for leaf in leaves]
        if not any(is_cut):
            raise TaskError(
                f"{self._where}: build_loader yields batches ({type(batch).__name__}) without a tensor whose first "
                "dimension is the samples. Yield tensors in dicts, tuples or lists, or give build_dataset and collate."
            )
        for row in range(num_samples):
            cut = [leaf[row : row + 1] if c else leaf for leaf, c in zip(leaves, is_cut, strict=True)]
            yield tree_unflatten(cut, structure)


def samples_of(loader: Any) -> int | None:
    """Samples in an epoch of a DataLoader; None where it, or another loader, does not say."""
    try:
        return len(loader.sampler) if isinstance(loader, DataLoader) else None  # type: ignore[arg-type]
    except TypeError:  # over a stream
        return None


def _num_samples(batch: Any, micro: int) -> int:
    """What a batch says of itself; where no tensor has a first dimension, as many as were asked for."""
    sizes = [len(tensor) for tensor in tensors_in(batch) if tensor.dim()]
    return micro if micro in sizes or not sizes else sizes[0]


def join(rows: list[Any]) -> Any:
    """A batch of the samples that an :class:`OwnLoader` was read as; what has no sample's dimension is the first's."""
    flat = [tree_flatten(row) for row in rows]
    leaves = [
        torch.cat(column) if isinstance(column[0], torch.Tensor) and column[0].shape[:1] == (1,) else column[0]
        for column in zip(*(found for found, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])
