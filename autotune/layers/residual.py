"""Sums of a residual stream: a sum of what is had again is had again, a few blocks far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import rematerialization
from .sites import Site

_FARTHEST = 4
"""Sums in a row that are computed again before one is kept: what is computed lies in memory together."""


def add(function: Callable[..., Any]) -> Callable[..., Any]:
    """``x + y``, in place or not."""

    def replacement(site: Site, input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        parts = _parts(input, other) if site.recomputes and not args and not kwargs else None
        output = function(input, other, *args, **kwargs)
        if parts is None or (output is input and isinstance(parts[0], Tensor)):  # what was kept is the sum now
            return output
        if max(part.num_sums for part in parts if isinstance(part, rematerialization.Remat)) >= _FARTHEST:
            return output
        return rematerialization.publish(output, torch.add, *parts, overwriting=Tensor.add_, num_sums=1)

    return replacement


def _parts(x: Any, y: Any) -> tuple[Tensor | rematerialization.Remat, Tensor | rematerialization.Remat] | None:
    """How both are rematerialized, or kept anyway; None if one is lost, both are kept, or the sum would broadcast."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype):
        return None
    first, second = rematerialization.part_of(x), rematerialization.part_of(y)
    is_possible = isinstance(first, rematerialization.Remat) or isinstance(second, rematerialization.Remat)
    return (first, second) if first is not None and second is not None and is_possible else None
