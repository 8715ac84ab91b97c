"""Weights of blocks are offloaded, in place, and are in memory again."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch import nn

from ....errors import PlanError
from .. import elsewhere
from .kept_content import Store
from .kept_on_host import HostStore
from .offloaded_weight import OffloadedWeight

_LEAST_BYTES = 2**16
"""Of a weight that is worth a write and a read."""


def offload(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    in_inference: bool = False,
    trained: bool = False,
    to_host: bool = False,
) -> int:
    """Offload weights of these blocks that do not train: names, shapes and dtypes stay.

    Args:
        model: changed in place.
        blocks: of it.
        in_inference: those that train too. They get no gradients until they are brought back.
        trained: those that train too, and get gradients.
        to_host: to the host's memory, from a card that the model is on or comes to. A weight that several blocks share,
            or a block and others, stays.

    Returns:
        How many there are.

    Raises:
        PlanError: what hangs on a weight that trains, or holds it, would be left with the one that was.
    """
    store = HostStore(in_inference) if to_host else Store()
    there = (one for block in blocks for one in block.modules() if not isinstance(one, nn.RNNBase))
    is_alone, block_of = _are_alone(model), _numbers(model, blocks) if to_host else {}
    weights = (weight for module in there for weight in module.parameters(False))
    found = {id(one): one for one in weights if _may_go(one, in_inference or trained, to_host) and is_alone(one)}
    if to_host:
        found = {key: one for key, one in found.items() if key in block_of}
        order = sorted({block_of[key] for key in found})
        block_of = {key: order.index(block_of[key]) for key in found}
    if not in_inference and (training := [one for one in found.values() if one.requires_grad]):
        _check_hooks(training)
        _check_holders(model, found, training)
    made = {key: OffloadedWeight.of(one, store, in_inference, block_of.get(key)) for key, one in found.items()}
    elsewhere.put_in_place(model, made.items())
    for weight in found.values():
        vars(weight)[_REPLACED] = weight.requires_grad
    return len(made)


def bring_back(model: nn.Module) -> None:
    """Undo :func:`offload`."""
    found = [one for one in model.parameters() if isinstance(one, OffloadedWeight)]
    elsewhere.bring_back(model, OffloadedWeight)
    for weight in found:
        vars(weight)[_REPLACED] = weight.is_for_training


def is_replaced(weight: torch.Tensor) -> bool:
    """Whether it trained, and another is in its place since."""
    return bool(vars(weight).get(_REPLACED))


def is_worth_it(tensor: torch.Tensor) -> bool:
    """Whether a tensor is large enough."""
    return tensor.nbytes >= _LEAST_BYTES


def _may_go(weight: nn.Parameter, may_train: bool, to_host: bool) -> bool:
    is_plain = type(weight) is nn.Parameter and weight.layout == torch.strided
    is_plain &= weight.device.type in (("cpu", "cuda") if to_host else ("cpu",))
    return is_plain and (may_train or not weight.requires_grad) and is_worth_it(weight)


def _numbers(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, int]:
    """The number of the block that alone has a parameter, by the parameter's identity."""
    inside = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    owners: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for weight in module.parameters(False):
            owners[id(weight)].add(inside.get(id(module), -1))
    return {key: number for key, (number, *others) in owners.items() if not others and number >= 0}


def _check_hooks(weights: Iterable[Any]) -> None:
    """
    Raises:
        PlanError: one has some.
    """
    for one in weights:
        if one._backward_hooks or one._post_accumulate_grad_hooks:
            raise PlanError(
                f"settings.offload: trained: a weight of {tuple(one.shape)} has a hook (register_hook), which the one "
                "in its place would not have. Register it once the plan is applied, or leave its block out of blocks."
            )


def _check_holders(model: nn.Module, weights: dict[int, nn.Parameter], trained: list[nn.Parameter]) -> None:
    """
    Raises:
        PlanError: somebody beside the model's modules, and us, has one that trains.
    """
    if next(_holders(model, weights, trained), None) is None:
        return
    gc.collect()  # it may be garbage
    if (holder := next(_holders(model, weights, trained), None)) is None:
        return
    held = {id(one) for one in gc.get_referents(holder)}
    shape = next(tuple(one.shape) for one in trained if id(one) in held)
    raise PlanError(
        f"settings.offload: trained: a weight of {shape} is held by a {type(holder).__name__} outside the model's "
        "modules (an optimizer that was built before, a list for a penalty, a variable), which would not know of the "
        "one in its place. Apply the plan before that is made, or leave its block out of blocks, or trained out."
    )


def _holders(model: nn.Module, *own: Any) -> Iterator[Any]:
    """Of weights, which the last of our own has: not those that a function is at."""
    known = {*map(id, own), *(id(one._parameters) for one in model.modules())}
    for one in gc.get_referrers(*own[-1]):
        if id(one) not in known and not isinstance(one, FrameType | GeneratorType):
            yield one


_REPLACED = "_autotune_replaced"
"""Among what hangs on a weight."""


def _are_alone(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """Whether no other parameter or buffer is the same memory, which what is written to it would no longer reach."""
    owners: dict[int, set[int]] = defaultdict(set)
    for one in (*model.parameters(), *model.buffers()):
        owners[one.untyped_storage()._cdata].add(id(one))
    return lambda weight: len(owners[weight.untyped_storage()._cdata]) == 1
