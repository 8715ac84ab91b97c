"""Identifies a task by its parameters and batch shapes, before any technique."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset, default_collate

from ..nested import tensors_in
from ..techniques.checkpointing import find_blocks
from ..techniques.support.facts import Identity

_MOST_TENSORS = 8
"""Of a batch that are told."""


def fingerprint(model: nn.Module, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> str:
    """Hash of parameter names, shapes, dtypes and trainable flags, and of the shapes of batches.

    Args:
        model: before any technique.
        dataset: its first and its last sample are collated, each alone; a dimension in which they differ does not
            count. An iterable dataset is not read.
        collate: the user's, or None.

    Returns:
        ``sha256:`` and 64 hexadecimal digits.
    """
    return _hash(model, sample_shapes(dataset, collate))


def identify(
    model: nn.Module, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, blocks: Sequence[str] = ()
) -> tuple[str, Identity]:
    """The fingerprint, and a description of the model and batches that it stands for.

    Args:
        model: before any technique.
        dataset: as :func:`fingerprint` reads it.
        collate: the user's, or None.
        blocks: module paths that the user gave for blocks.
    """
    shapes = sample_shapes(dataset, collate)
    found = find_blocks(model, blocks)
    parameters = dict(model.named_parameters())
    frozen = sum(p.numel() for p in parameters.values() if not p.requires_grad)
    kinds = dict.fromkeys(type(block).__name__ for block in found)
    dtypes = sorted({_name(p.dtype) for p in parameters.values()})
    words = (
        f"{len(found)} blocks of {' or '.join(kinds) or 'none'}",
        f"{sum(p.numel() for p in parameters.values()):,} parameters",
        f"{frozen:,} of them frozen" if frozen else "none of them frozen",
        f"{len(parameters)} tensors of {' and '.join(dtypes) or 'none'}",
    )
    names = hashlib.sha256("\n".join(parameters).encode()).hexdigest()[:8]
    return _hash(model, shapes), Identity(model=", ".join(words), names=names, batch=batch_words(shapes))


def _hash(model: nn.Module, shapes: list[list[Any]]) -> str:
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()]
    text = json.dumps([parameters, shapes])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def batch_words(shapes: list[list[Any]]) -> str:
    """Dtype and shape of each tensor of :func:`sample_shapes`, for people."""
    told = [
        f"{_name(dtype)} [{', '.join('*' if size is None else str(size) for size in shape)}]"
        for dtype, shape in shapes[:_MOST_TENSORS]
    ]
    more = len(shapes) - len(told)
    return "; ".join([*told, f"{more} more tensors"] if more else told)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def sample_shapes(dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> list[list[Any]]:
    """Dtype and shape of each tensor in a collated sample, with None for dimensions that vary and for the batch."""
    if isinstance(dataset, IterableDataset) or len(dataset) == 0:
        return []
    first, last = (
        [(str(t.dtype), tuple(t.shape)) for t in tensors_in((collate or default_collate)([dataset[index]]))]
        for index in (0, len(dataset) - 1)
    )
    return [
        [dtype, [a if a == b and axis else None for axis, (a, b) in enumerate(zip(shape, other, strict=False))]]
        for (dtype, shape), (_, other) in zip(first, last, strict=False)
    ]
