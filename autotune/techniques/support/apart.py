"""Parameters that an optimizer's own class updates apart from the others, in a step's course."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Update = Callable[["torch.optim.Optimizer", dict[str, Any], "Tensor", dict[str, Any]], dict[str, Any]]
"""Updates a parameter of a group by a copy of its optimizer, from its state; returns its state after that."""
OF_A_SCALER = ("grad_scale", "found_inf")
"""What torch.amp.GradScaler gives an optimizer for the time of a step."""


def update_apart(
    optimizer: torch.optim.Optimizer, owner: torch.optim.Optimizer, takes: Callable[[Tensor], bool], update: Update
) -> None:
    """Have an optimizer update the parameters that are taken so, where its ``step`` gathers those of a group
    (``_init_group``), which then leaves them out.

    Args:
        optimizer: it stays the object that schedulers, checkpoints and hooks know.
        owner: itself, or the one that it is a copy of and shares its state with.
        takes: a parameter.
        update: one of those, which has a gradient.
    """
    gather = type(optimizer)._init_group  # type: ignore[attr-defined]
    alone, mine, owners = copy.copy(owner), weakref.ref(optimizer), weakref.ref(owner)

    def gathered(group: dict[str, Any], *lists: Any) -> Any:
        optimizer = mine()
        assert optimizer is not None, "it is stepped now"
        for name in OF_A_SCALER:
            setattr(alone, name, getattr(owners(), name, None))
        others = []
        for parameter in group["params"]:
            if not takes(parameter):
                others.append(parameter)
            elif parameter.grad is not None:
                optimizer.state[parameter] = update(alone, group, parameter, optimizer.state[parameter])
        return gather(optimizer, {**group, "params": others}, *lists)

    optimizer._init_group = gathered  # type: ignore[attr-defined]


def update_together(optimizer: torch.optim.Optimizer) -> None:
    """Have it gather all parameters, as its class does."""
    optimizer.__dict__.pop("_init_group", None)


def step_unseen(optimizer: torch.optim.Optimizer) -> None:
    """Its class's step, of which no hooks are told, those of every optimizer's steps neither."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


def step_of(alone: torch.optim.Optimizer, group: dict[str, Any], part: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Step a part of a parameter by itself, of which hooks of every optimizer's steps are not told.

    Args:
        alone: a copy of its optimizer.
        group: the parameter's.
        part: with its gradient.
        state: the part's; changed in place.

    Returns:
        Its state after that.
    """
    alone.state, alone.param_groups = defaultdict(dict, {part: state}), [{**group, "params": [part]}]
    step_unseen(alone)
    after = dict(alone.state[part])
    alone.state, alone.param_groups = defaultdict(dict), []
    return after
