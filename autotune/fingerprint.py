"""What identifies a task: parameters and batch shapes, before any technique."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset, default_collate

from .loader import tensors_in

__all__ = ["fingerprint", "sample_shapes"]


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
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()]
    text = json.dumps([parameters, sample_shapes(dataset, collate)])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


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
