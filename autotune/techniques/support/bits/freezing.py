"""Weights of a model that do not train become codes, in place, and numbers again."""

from __future__ import annotations

from typing import Any

from torch import nn

from .frozen_weight import FrozenWeight
from .weight_codes import FLOATS, Form


def freeze(model: nn.Module, kind: str) -> int:
    """Keep weights that do not train as codes, in place: names, shapes and dtypes stay.

    Returns:
        How many there are.
    """
    made = {id(weight): FrozenWeight.of(weight, kind) for weight in frozen_weights(model)}
    for module, name, weight in _parameters(model):
        if id(weight) in made:
            module.register_parameter(name, made[id(weight)])  # type: ignore[arg-type]
            module.register_state_dict_post_hook(_in_full)  # type: ignore[no-untyped-call]
    return len(made)


def thaw(model: nn.Module) -> None:
    """Undo :func:`freeze`: the numbers stay as they were rounded."""
    made: dict[int, nn.Parameter] = {}
    for module, name, weight in _parameters(model):
        if isinstance(weight, FrozenWeight):
            full = made.setdefault(id(weight), weight.full())
            module.register_parameter(name, full)
            hooks = module._state_dict_hooks
            for key in [key for key, hook in hooks.items() if hook is _in_full]:
                del hooks[key]


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """All, with the modules that have them and their names there."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


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


def _in_full(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict has numbers, unless it is asked for the very parameters."""
    for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
        kept: Any = state_dict.get(prefix + name)
        if isinstance(kept, FrozenWeight) and kept is not weight:
            state_dict[prefix + name] = kept.numbers()
