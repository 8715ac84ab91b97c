"""What makes two passes of a model comparable: no dropout, wherever it is called, and buffers that stay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_FUNCTIONS = {
    "dropout": ("p", 1),
    "dropout1d": ("p", 1),
    "dropout2d": ("p", 1),
    "dropout3d": ("p", 1),
    "alpha_dropout": ("p", 1),
    "feature_alpha_dropout": ("p", 1),
    "scaled_dot_product_attention": ("dropout_p", 4),
}
"""Functions of torch.nn.functional, with the name and the place of their probability."""
_NUMBERS = (bool, int, float)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Within the block, no dropout drops: torch's modules, recurrent layers, attention, and the functional forms.

    Modes stay as they are. The functions are replaced in ``torch.nn.functional`` for the whole process, and not by a
    mode: on CUDA, backward recomputes checkpointed blocks in a thread of its own, where a mode is not active. What
    a file imported by name before (``from torch.nn.functional import dropout``) is not reached.
    """
    with ExitStack() as stack:
        for module in model.modules():
            name = _probability_of(module)
            if name is not None:
                _set(stack, module, name, 0.0)
        for name, (argument, place) in _FUNCTIONS.items():
            _set(stack, F, name, _with_zero(getattr(F, name), argument, place))
        yield


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Buffers are afterwards what they were, also those that forward puts others in the place of; so are the numbers
    that modules have as attributes."""
    modules = [*model.modules()]
    buffers = [dict(module._buffers) for module in modules]
    values = {id(one): one.clone() for row in buffers for one in row.values() if one is not None}
    numbers = [{name: one for name, one in vars(module).items() if type(one) in _NUMBERS} for module in modules]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, row, kept in zip(modules, buffers, numbers, strict=True):
                for one in row.values():
                    if one is not None:
                        one.copy_(values[id(one)])
                module._buffers.clear()
                module._buffers.update(row)
                vars(module).update(kept)


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _probability_of(module: nn.Module) -> str | None:
    if isinstance(module, _DropoutNd):
        return "p"
    return "dropout" if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) else None


def _with_zero(function: Callable[..., Any], argument: str, place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            return function(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return function(*args, **{**kwargs, argument: 0.0})

    return call
