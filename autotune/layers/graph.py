"""What these layers read of autograd's graph while it is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..internals.fake_tensors import FakeTensor


def run(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """``function.apply``, which torch does not annotate."""
    output: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


def notes_of(node: Any) -> dict[Any, Any]:
    """What is noted on an autograd node, as long as it lives; empty for None."""
    return {} if node is None else node.metadata


def saved_tensors_hooks() -> Any:
    """The innermost hooks on saved tensors, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def is_in_checkpoint() -> bool:
    """Whether what is saved now is dropped and recomputed by ``torch.utils.checkpoint``."""
    hooks = saved_tensors_hooks()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast computes matrix products of ``x`` in; None where it is off, or leaves ``x`` alone."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    if x.dtype == torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(kind)


def turns(length: int, step: int, x: Tensor) -> range:
    """Where the turns of a loop over pieces of ``x`` start. Over fake tensors the first alone: each takes and
    gives back the same memory, and an allocation's number does not depend on the batch."""
    starts = range(0, length, step)
    return starts[:1] if isinstance(x, FakeTensor) else starts
