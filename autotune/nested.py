"""Nested batches: dicts, tuples, lists, dataclasses of tensors, and whatever moves itself."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["tensors_in", "to_device"]


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
