"""Forwards of our own, which instances have in the place of their class's: partial functions of the one before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def has_forward(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Whether a module's forward is a partial of this function."""
    forward = vars(module).get("forward")
    return isinstance(forward, functools.partial) and forward.func is function


def take_off(model: nn.Module, function: Callable[..., Any]) -> None:
    """Give the modules that have it the forward back that is its first argument."""
    for module in model.modules():
        if has_forward(module, function):
            forward = vars(module).pop("forward")
            if module.forward != forward.args[0]:
                module.forward = forward.args[0]
