"""Weights of a model that do not train become codes, in place, and numbers again."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..elsewhere import bring_back, put_in_place
from .frozen_weight import FrozenWeight
from .weight_codes import FLOATS, Form


def freeze(model: nn.Module, kind: str) -> int:
    """Keep weights that do not train as codes, in place: names, shapes and dtypes stay.

    Returns:
        How many there are.
    """
    made = {id(weight): FrozenWeight.of(weight, kind) for weight in frozen_weights(model)}
    put_in_place(model, made)
    return len(made)


def thaw(model: nn.Module) -> None:
    """Undo :func:`freeze`: the numbers stay as they were rounded."""
    bring_back(model, FrozenWeight)


def frozen_weights(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear layers and embeddings that do not train and that codes would be smaller than.

    Only of torch's own classes and transformers' Conv1D: what has another forward, or makes its weight of others, is
    left alone.
    """
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if _is_known(module) and _can_be_codes(weight):
            known[id(weight)] = weight
    return [*known.values()]


def _is_known(module: nn.Module) -> bool:
    own = type(module)
    is_conv1d = own.__name__ == "Conv1D" and own.__module__ == "transformers.pytorch_utils"
    is_table = own is nn.Embedding and module.max_norm is None
    return own is nn.Linear or is_conv1d or is_table


def _can_be_codes(weight: Any) -> bool:
    if type(weight) is not nn.Parameter or weight.dtype not in FLOATS or weight.requires_grad:
        return False
    is_plain = weight.is_contiguous() and weight.numel() > 0
    return is_plain and Form("8bit", weight.shape, weight.dtype).num_bytes < weight.nbytes
