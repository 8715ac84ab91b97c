"""Loader workers that stay from epoch to epoch: who holds them, and how they hear of their end."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch._C import _remove_worker_pids, _set_worker_pids

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


def handed_on(iteration: Any) -> Any:
    """An iteration of a DataLoader with the workers of another, for a loop that holds that one to the end.

    The other stays as it is, at its end: torch would begin the next epoch in that very object, and give a loop that
    goes on with it the batches of another.

    Args:
        iteration: of a loader with persistent workers.

    Returns:
        None where batches of it are still to come.
    """
    if iteration._tasks_outstanding or iteration._rcvd_idx < iteration._send_idx:
        return None
    taken = object.__new__(type(iteration))
    vars(taken).update(vars(iteration))
    _remove_worker_pids(id(iteration))
    _set_worker_pids(id(taken), tuple(worker.pid for worker in taken._workers))
    vars(iteration).update(_shutdown=True, _worker_pids_set=False)  # so that its end is not the workers'
    if taken._pin_memory and hasattr(taken, "_register_persistent_workers_atexit"):
        taken._register_persistent_workers_atexit()
    return taken
