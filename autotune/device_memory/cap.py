"""Holds a process to a budget as a CUDA device of that size would: a trial, ``autotune verify`` and a job alike.

Torch's allocator refuses what would take its reservation over a cap, once it has given back what it only keeps for
reuse. The context is taken off the cap: torch does not count it (https://github.com/pytorch/pytorch/issues/58466).
Without a CUDA device nothing here does anything.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..nested import bytes_in
from ..units import MIB, format_bytes, size
from . import context

_WSL = Path("/dev/dxg")
"""Of Windows' driver."""


@dataclass
class _Cap:
    """What a process is held to."""

    limit_bytes: int
    """The budget, as it is told."""
    most_bytes: int
    """That the device may charge the process, so that it is within the budget with its margin."""
    is_enforced: bool
    """Whether the process ends rather than go over it."""
    context_bytes: int
    """What the context comes to once a step was made, as far as that is known; else 0."""
    num_steps: int = 0
    largest: int = 0
    """Bytes of the largest batch so far."""
    is_aside: bool = False
    """Whether it is lifted, for one step."""
    most_allocated: int = 0
    """Before that step."""
    has_begun: bool = False
    """Whether CUDA is in use, which it never is in a process on a CPU."""

    @property
    def reservation_bytes(self) -> int:
        """What the allocator may reserve."""
        known = self.context_bytes
        if context.is_told() or not known:
            known = max(known if not self.num_steps else 0, context.context_bytes())
        return max(0, self.most_bytes - known)

    def put(self) -> None:
        """Apply it."""
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(self.reservation_bytes / total, 1.0))


_cap: _Cap | None = None
"""None where the process is held to nothing."""


def hold(limit_bytes: int | None, margin: float, is_enforced: bool, context_bytes: int = 0) -> None:
    """Hold this process to a budget, from its first use of CUDA on.

    Args:
        limit_bytes: the budget; None lifts the one that is set.
        margin: the process stays within the budget with so much more, as a share; below 0, it may exceed it by that.
        is_enforced: memory that runs out is the process's to bear, as on a device of that size; else the cap is
            lifted where a step's tensors need more, with a line that says so.
        context_bytes: what the context is known to come to once a step was made; 0 is not known.
    """
    global _cap
    if limit_bytes is None:
        if _in_force() is not None:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)
        _cap = None
        return
    most = int(limit_bytes / (1 + margin)) // MIB * MIB  # peaks are rounded up to whole MiB before they are judged
    _cap = _Cap(limit_bytes, most, is_enforced, context_bytes)
    torch.cuda._lazy_call(functools.partial(_begin, _cap))  # type: ignore[no-untyped-call]


def lends_host_memory() -> bool:
    """Whether the driver gives a process host memory where the device's runs out, and no error: Windows' does, and what
    is computed there takes many times as long. In WSL its setting against that has no effect.

    Source: https://nvidia.custhelp.com/app/answers/detail/a_id/5490, https://github.com/microsoft/WSL/issues/11050
    """
    return _WSL.exists()


def stay_on_device() -> None:
    """Let a process that is held to no budget have what the device has free as it first uses CUDA, and no host memory
    in its place."""
    if lends_host_memory():
        torch.cuda._lazy_call(_stay_on_device)  # type: ignore[no-untyped-call]


def batch_comes(batch: Any) -> None:
    """A batch is about to be trained on: on one that is larger than all before, a job's step is made without the cap.
    But for the first, which is the trial's."""
    cap = _in_force()
    if cap is None or cap.is_enforced:
        return
    num_bytes = bytes_in(batch)
    if num_bytes > cap.largest:
        cap.largest = num_bytes
        if cap.num_steps:
            stand_aside()


def may_stand_aside() -> bool:
    """Whether a job is held, and goes on where memory runs out."""
    cap = _in_force()
    return cap is not None and not cap.is_enforced and not cap.is_aside


def stand_aside() -> None:
    """Let a job's step be made without the cap, so that the job is not ended by it; from an empty cache, so that it
    takes no more than it needs. :func:`step_ended` tells whether that was more than the budget."""
    if _cap is not None and may_stand_aside():
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        _cap.is_aside, _cap.most_allocated = True, torch.cuda.max_memory_allocated()


def step_begins() -> None:
    """An optimizer step begins."""
    context.step_begins()


def step_ended() -> None:
    """An optimizer step has ended. After the first, and less and less often, the context is looked at again: libraries
    and kernels are loaded as they are first used."""
    context.step_ended()
    if (cap := _in_force()) is None:
        return
    cap.num_steps += 1
    if cap.is_aside:
        cap.is_aside = False
        if (taken := torch.cuda.max_memory_allocated()) > max(cap.reservation_bytes, cap.most_allocated):
            _lift(cap, taken)
            return
    elif cap.num_steps & (cap.num_steps - 1):  # not a power of two
        return
    most = cap.reservation_bytes
    cap.put()
    if torch.cuda.memory_reserved() > most:
        torch.cuda.empty_cache()
    if cap.is_enforced and torch.cuda.max_memory_reserved() > most:
        # While the context was smaller the cache could fill what is the context's now. That is no need of the training.
        torch.cuda.reset_peak_memory_stats()


def _lift(cap: _Cap, taken: int) -> None:
    """Let the process have the whole device from here on, and say so."""
    global _cap
    print(
        f"autotune: a step takes {size(taken)} of tensors, more than the plan's budget of "
        f"{format_bytes(cap.limit_bytes)} holds. The job goes on without the budget, and may take all of the device's "
        "memory; `autotune run --enforce` would end it.",
        file=sys.stderr,
        flush=True,
    )
    _cap = None


def _in_force() -> _Cap | None:
    return _cap if _cap is not None and _cap.has_begun else None


def _stay_on_device() -> None:
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (free + torch.cuda.memory_reserved()) / total))


def _begin(cap: _Cap) -> None:
    if cap is _cap:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            context.open_context()
        cap.has_begun = True
        cap.put()
