"""Weights of blocks that do not train are offloaded, in place, and are in memory again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import nn

from .. import elsewhere
from .kept_content import Store
from .offloaded_weight import OffloadedWeight

_LEAST_BYTES = 2**16
"""Of a weight that is worth a write and a read."""


def offload(model: nn.Module, blocks: Iterable[nn.Module], in_inference: bool = False) -> int:
    """Offload weights of these blocks that do not train: names, shapes and dtypes stay.

    Args:
        model: changed in place.
        blocks: of it.
        in_inference: those that train too. They get no gradients until they are brought back.

    Returns:
        How many there are.
    """
    store = Store()
    there = (one for block in blocks for one in block.modules() if not isinstance(one, nn.RNNBase))
    is_alone = _are_alone(model)
    weights = (weight for module in there for weight in module.parameters(False))
    found = {id(one): one for one in weights if _may_go(one, in_inference) and is_alone(one)}
    made = {key: OffloadedWeight.of(weight, store) for key, weight in found.items()}
    elsewhere.put_in_place(model, made.items())
    return len(made)


def bring_back(model: nn.Module) -> None:
    """Undo :func:`offload`."""
    elsewhere.bring_back(model, OffloadedWeight)


def _may_go(weight: nn.Parameter, may_train: bool) -> bool:
    is_plain = type(weight) is nn.Parameter and weight.layout == torch.strided and weight.device.type == "cpu"
    return is_plain and (may_train or not weight.requires_grad) and weight.nbytes >= _LEAST_BYTES


def _are_alone(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """Whether no other parameter or buffer is the same memory, which what is written to it would no longer reach."""
    owners: dict[int, set[int]] = defaultdict(set)
    for one in (*model.parameters(), *model.buffers()):
        owners[one.untyped_storage()._cdata].add(id(one))
    return lambda weight: len(owners[weight.untyped_storage()._cdata]) == 1
