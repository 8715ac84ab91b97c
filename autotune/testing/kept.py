"""What autograd keeps for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["kept_bytes"]

T = TypeVar("T")


def kept_bytes(forward: Callable[[], T], model: nn.Module) -> tuple[int, T]:
    """Bytes that a forward saves for its backward, each storage once and the model's own left out; and its output."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # alive, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    return sum(storage.nbytes() for storage in kept.values()), output
