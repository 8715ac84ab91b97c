"""Offloaded weights that train are updated one at a time, and their optimizer's state lies where they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ....internals.fake_tensors import FakeTensor
from .offloaded_weight import OffloadedWeight
from .offloading import is_worth_it


@contextmanager
def in_memory(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """What is written meanwhile to an offloaded parameter and its state is written to where they lie, and state that is
    new goes there after that; others stay where they are.

    Raises:
        UserError: the disk is full.
    """
    if not isinstance(parameter, OffloadedWeight):
        yield
        return
    with ExitStack() as lent:
        lent.enter_context(parameter.lent())
        row = optimizer.state.get(parameter, {})
        kept = {name: one for name, one in row.items() if isinstance(one, OffloadedWeight)}
        row.update(numbers := {name: lent.enter_context(one.lent()) for name, one in kept.items()})
        yield
    row = optimizer.state.get(parameter, {})
    row.update({name: kept[name] for name, one in row.items() if name in kept and one is numbers[name]})
    move(row, parameter)


def move_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the state of offloaded parameters where those lie, however it came to be.

    Raises:
        UserError: the disk is full.
    """
    for parameter, row in optimizer.state.items():
        if isinstance(parameter, OffloadedWeight):
            move(row, parameter)


def is_on_host(parameter: Tensor) -> bool:
    """Whether it is a card's, and offloaded."""
    return isinstance(parameter, OffloadedWeight) and parameter.is_cuda


def move(row: dict[str, Any], weight: OffloadedWeight) -> None:
    """Have its state, of what there is by now, where it lies.

    Raises:
        UserError: the disk is full.
    """
    for name, one in row.items():
        if type(one) in (Tensor, FakeTensor) and is_worth_it(one) and one.device == weight.device:
            row[name] = OffloadedWeight.state(one, weight)
