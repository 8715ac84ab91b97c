"""Nested batches: dicts, tuples, lists, dataclasses of tensors, and whatever moves itself."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

_NARROW = (torch.bfloat16, torch.float16)


def to_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """A nested batch (dicts, tuples, lists, dataclasses, anything with ``.to``) with its tensors on ``device``."""
    if hasattr(batch, "to"):
        try:
            return batch.to(device, non_blocking=non_blocking)
        except TypeError:
            return batch.to(device)
    return _rebuilt(batch, lambda value: to_device(value, device, non_blocking))


def samples_in(nested: Any, otherwise: int = 0) -> int:
    """By the first dimension of the first tensor that has one; ``otherwise`` where none has."""
    return next((len(tensor) for tensor in tensors_in(nested) if tensor.dim()), otherwise)


def widened(outputs: Any, dtype: torch.dtype) -> Any:
    """What a model returns under autocast, with its tensors of bf16 and fp16 in ``dtype``, as they are without.

    Of dicts, tuples, lists, dataclasses and what is registered as a pytree; what else there is stays as it is.
    """

    def of_leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.dtype in _NARROW else value
        return _rebuilt(value, lambda one: widened(one, dtype))

    if all(tensor.dtype not in _NARROW for tensor in tensors_in(outputs)):
        return outputs
    return tree_map(of_leaf, outputs)


def rows_of(batch: Any, num_samples: int, rows: slice) -> Any:
    """Some samples of a nested batch: of tensors whose first dimension is the samples, and of lists with an entry for
    each; the rest stays whole.

    Raises:
        ValueError: a list of as many tensors as samples, which may be either; or a sparse or nested tensor whose rows
            torch does not select.
    """
    if isinstance(batch, torch.Tensor):
        return _rows(batch, rows) if batch.dim() and len(batch) == num_samples else batch
    if isinstance(batch, (list, tuple)) and len(batch) == num_samples and not hasattr(batch, "_fields"):
        is_cut = [isinstance(one, torch.Tensor) and one.dim() > 0 and len(one) == num_samples for one in batch]
        if all(is_cut) and len({(one.dtype, one.dim()) for one in batch}) == 1:
            raise ValueError(f"{num_samples} tensors of {num_samples} rows may be samples, or columns of them")
        if not any(is_cut):
            return batch[rows]
    return _rebuilt(batch, lambda value: rows_of(value, num_samples, rows))


def _rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Some rows; torch slices no sparse tensor, and selects from one by coordinates alone."""
    if tensor.layout is torch.strided:
        return tensor[rows]
    compressed = tensor.layout in (torch.sparse_csr, torch.sparse_csc)
    if tensor.layout is not torch.sparse_coo and not (compressed and tensor.dim() - tensor.dense_dim() == 2):
        raise ValueError(
            f"rows of a tensor in {tensor.layout} of {tensor.dim()} dimensions are not taken: use strided, sparse_coo, "
            "or sparse_csr of two dimensions"
        )
    places = torch.arange(*rows.indices(len(tensor)), device=tensor.device)
    found: torch.Tensor = tensor.to_sparse(layout=torch.sparse_coo).index_select(0, places)
    return found.to_sparse(layout=tensor.layout)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse one is made of, in torch's order; of any other itself."""
    match tensor.layout:
        case torch.sparse_coo:
            return tensor._indices(), tensor._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def bytes_in(nested: Any) -> int:
    """Bytes of the tensors of a nested batch; of a sparse one, of what it stores."""
    parts = (part for tensor in tensors_in(nested) for part in dense_parts(tensor))
    return sum(part.numel() * part.element_size() for part in parts)


def mapped(batch: Any, each: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A nested batch with each of its tensors changed, in the order of :func:`tensors_in`."""
    return each(batch) if isinstance(batch, torch.Tensor) else _rebuilt(batch, lambda value: mapped(value, each))


def _rebuilt(batch: Any, each: Callable[[Any], Any]) -> Any:
    """A container with each of its values changed; anything else as it is."""
    if isinstance(batch, Mapping):
        items = {key: each(value) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return items
        # A copy, since a defaultdict or a user's mapping is not built from a dict.
        copied = copy.copy(batch)
        copied.update(items)
        return copied
    if isinstance(batch, tuple):
        moved = [each(value) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, list):
        return [each(value) for value in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # A copy, since fields may be frozen, or no argument of the constructor.
        record = copy.copy(batch)
        for f in dataclasses.fields(batch):
            object.__setattr__(record, f.name, each(getattr(batch, f.name)))
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
