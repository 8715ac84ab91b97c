"""What autograd keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def kept_bytes(forward: Callable[[], T], model: nn.Module) -> tuple[int, T]:
    """Bytes that a forward keeps for its backward, each storage once and the model's own left out; and its output.

    Counted is what autograd saves, and what its nodes hold besides: hooks on saved tensors do not see that. Run the
    output's backward: until then nothing of it is freed, since a node that saved its own output holds itself.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # alive, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    for tensor in _held_by_nodes(output):
        pack(tensor)
    return sum(storage.nbytes() for storage in kept.values()), output


def _held_by_nodes(output: object) -> Iterator[Tensor]:
    """Tensors that the graph's nodes hold as attributes or in their metadata."""
    waiting: list[Any] = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            held = tree_leaves((getattr(node, "__dict__", {}), node.metadata))
            yield from (leaf for leaf in held if isinstance(leaf, Tensor))
            waiting += [following for following, _ in node.next_functions]
