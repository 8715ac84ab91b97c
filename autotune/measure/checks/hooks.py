"""Finds hooks on the user's optimizer that torch cannot call, before a job's first step does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...errors import TaskError

_CALLED = "(optimizer, args, kwargs)"


def check_hooks(optimizer: torch.optim.Optimizer, source: str) -> None:
    """Call the optimizer's step pre-hooks as its first step would, and check that it could call the post-hooks.

    Args:
        optimizer: whose parameters have their gradients.
        source: the task's file, for messages.

    Raises:
        TaskError: a hook takes other arguments, or returns what torch refuses.
        Exception: whatever a hook raises.

    Source: torch.optim.Optimizer.profile_hook_step
    """
    before, after = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}).values() for when in ("pre", "post"))
    for hook in (*before, *after):
        _check_arguments(hook, source)
    for hook in before:
        returned = hook(optimizer, (), {})
        if returned is not None and not (isinstance(returned, tuple) and len(returned) == 2):
            raise TaskError(
                f"{source or 'task'}: a step pre-hook of the optimizer, {_named(hook)}, returned "
                f"{type(returned).__name__}: torch takes None, or (args, kwargs), and would raise at the first step. A "
                "lambda returns what it calls: write a function without a return. To clip, set max_grad_norm."
            )


def _check_arguments(hook: Callable[..., Any], source: str) -> None:
    try:
        takes = inspect.signature(hook)
    except (TypeError, ValueError):  # some builtins do not say
        return
    try:
        takes.bind(None, (), {})
    except TypeError:
        raise TaskError(
            f"{source or 'task'}: a step hook of the optimizer, {_named(hook)}, takes {takes}, but torch calls it with "
            f"{_CALLED}. Let it take these three, or *_."
        ) from None


def _named(hook: Callable[..., Any]) -> str:
    """A hook's name and place, for messages."""
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    code = getattr(hook, "__code__", None)
    return f"{name} (line {code.co_firstlineno})" if code is not None else name
