"""Weights of a model that do not train, or of one for inference, become codes, in place, and numbers again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..elsewhere import bring_back, put_in_place
from .frozen_weight import FrozenWeight
from .weight_codes import FLOATS, Form

_MARK = "_rounded_in_inference"
"""What hangs on a weight that inference has frozen: the kind of its codes, and whether it trained before."""


def freeze(model: nn.Module, kind: str, in_inference: bool = False) -> int:
    """Keep weights that do not train as codes, in place: names, shapes and dtypes stay.

    Args:
        model: changed in place, a weight at a time: the numbers and the codes of all are never there together.
        kind: of codes.
        in_inference: those that train too. They get no gradients, and are marked.

    Returns:
        How many there are.
    """
    weights: list[Any] = frozen_weights(model, in_inference)
    number = len(weights)

    def made() -> Iterator[tuple[int, FrozenWeight]]:
        while weights:
            weight = weights.pop()
            if in_inference:
                setattr(weight, _MARK, (kind, weight.requires_grad))
                weight.requires_grad_(False)
            yield id(weight), FrozenWeight.of(weight, kind)

    put_in_place(model, made())
    return number


def thaw(model: nn.Module) -> None:
    """Undo :func:`freeze`: the numbers stay as they were rounded, and those train that did."""
    bring_back(model, FrozenWeight)
    for weight in model.parameters():
        if hasattr(weight, _MARK):
            weight.requires_grad_(getattr(weight, _MARK)[1])


def rounded_in_inference(model: nn.Module) -> set[str]:
    """The kinds of codes that a plan for inference has rounded the model's weights to, with or without codes now."""
    return {getattr(one, _MARK)[0] for one in model.parameters() if hasattr(one, _MARK)}


def frozen_weights(model: nn.Module, in_inference: bool = False) -> list[nn.Parameter]:
    """Weights of linear layers and embeddings that do not train, or all, that codes would be smaller than.

    Only of torch's own classes and transformers' Conv1D: what has another forward, or makes its weight of others, is
    left alone.
    """
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if _is_known(module) and _can_be_codes(weight, in_inference):
            known[id(weight)] = weight
    return [*known.values()]


def _is_known(module: nn.Module) -> bool:
    own = type(module)
    is_conv1d = own.__name__ == "Conv1D" and own.__module__ == "transformers.pytorch_utils"
    is_table = own is nn.Embedding and module.max_norm is None
    return own is nn.Linear or is_conv1d or is_table


def _can_be_codes(weight: Any, may_train: bool) -> bool:
    if type(weight) is not nn.Parameter or weight.dtype not in FLOATS or (weight.requires_grad and not may_train):
        return False
    is_plain = weight.is_contiguous() and weight.numel() > 0
    return is_plain and Form("8bit", weight.shape, weight.dtype).num_bytes < weight.nbytes
