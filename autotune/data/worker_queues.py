"""Loader workers hear of their end, also from the garbage collector."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["hold_queues"]

_QUEUES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Those through which the workers of each living iteration are told what to read."""


def hold_queues(iteration: Any) -> None:
    """Have the workers of a DataLoader's iteration end at once, whatever ends it.

    The garbage collector closes the queues of all that it has found unreachable before it calls ``__del__``, by which
    torch tells workers of their end: none would hear of it, and torch waits 5 s for each. What is held here is
    reachable until then.

    Source: https://github.com/pytorch/pytorch/issues/64766
    """
    queues = getattr(iteration, "_index_queues", None)
    if queues is not None:
        _QUEUES[iteration] = queues
