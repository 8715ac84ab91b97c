"""Others that hold memory of the card that a trial runs on: they are waited for, and named; what they take is held
against no configuration."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from ..device_memory.cap import stay_on_device
from ..device_memory.context import context_bytes, open_context, open_when_used
from ..device_memory.nvml import ask
from ..plan import Budget, Plan
from ..training.out_of_memory import is_out_of_memory
from ..units import MIB, format_bytes, parse_bytes, size
from .errors import DeviceLost
from .measurement import MeasureOptions
from .processes import descendants

_Answer = TypeVar("_Answer")

_PATIENCE_S, _LOOK_S = 10.0, 0.25
"""How long others may take to give memory back: a process that has ended does within seconds."""
_QUIET_BYTES = 512 * MIB
"""What may be this process's own, where the driver does not show whose memory is whose: kernels are loaded as they are
used. Also what a display may take beside a budget that is all of the card."""
_SEGMENT_BYTES = 20 * MIB
"""The allocator asks for no less at once, unless for the smallest tensors."""
_ASKED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")  # (torch 2.13, c10/cuda/CUDACachingAllocator.cpp)

_CONTEXT_BYTES = 1024 * MIB
"""More than a context takes: where the driver does not say what this one does."""

_began_with: int | None = None
"""Bytes of the card that this process had, or could have had, as its trial began; None where it was not asked."""


class User(NamedTuple):
    """Another process on the card."""

    pid: int
    name: str
    num_bytes: int
    shows: bool
    """Whether it draws a display, as a desktop does: that is there to stay."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {size(self.num_bytes)}"


def take_card(plan: Plan | None, options: MeasureOptions | None, index: Callable[[], int | None]) -> None:
    """As whatever runs here first uses CUDA, take a card, and see that others leave the memory that it may take.

    Args:
        plan: whose budget that is, where it is held to it.
        options: how it is measured; None where it is not.
        index: tells then which of those that this process sees; None is the current one.
    """
    budget = plan.budget if plan is not None and options is not None and options.enforce else None
    if options is not None and options.turns is not None:
        open_when_used(index)  # the other of the two, which is ours, holds memory there, too
    else:
        torch.cuda._lazy_call(lambda: wait_for_room(budget, index()))  # type: ignore[no-untyped-call]
    if budget is None:
        stay_on_device()


def wait_for_room(budget: Budget | None, index: int | None = None) -> None:
    """Wait until the card has as much memory for this process as its trial may take, and open its context.

    Args:
        budget: that the trial is held to; None where it may take what there is, which is only noted.
        index: the device to take, of those that this process sees; None is the current one.

    Raises:
        DeviceLost: others still hold it after ten seconds.
    """
    global _began_with
    until_s = time.monotonic() + _PATIENCE_S
    while not (is_enough := _wanted_bytes(budget) <= (room := _room_bytes(index))) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    if not is_enough:
        left = "not even CUDA's context fits"
        if room >= 0 and budget is not None and budget.limit is not None:
            left = f"of a budget of {format_bytes(budget.limit)} it can have {size(room)}"
        raise DeviceLost(
            f"{_name_of_card()}: others hold memory that a trial needs: {left}. {_named(users())} End what holds it, "
            "search on another device, or give a smaller --budget."
        )
    _began_with = room


def shortage(said: str) -> str | None:
    """Why memory ran out where it was others that took it; None where this process took all that it may have.

    Args:
        said: the error's text.
    """
    if _began_with is None:
        return None
    free, total = torch.cuda.mem_get_info()
    share = torch.cuda.get_per_process_memory_fraction()
    asked = parse_bytes(found[1]) if (found := _ASKED.search(said)) else 0
    every, gone = users(), _began_with - _room_bytes()
    if share == 1:  # else what others held as the trial began had left enough
        gone = max(gone, sum(one.num_bytes for one in every if not one.shows))
    is_over = max(asked, _SEGMENT_BYTES) > share * total - torch.cuda.memory_reserved()
    if is_over or free > max(asked, _QUIET_BYTES) or gone <= _QUIET_BYTES or asked > free + gone:
        return None
    return (
        f"{_name_of_card()}: the device was short by {size(max(asked - free, MIB))}, which others "
        f"hold: {said.strip().partition(chr(10))[0]} {_named(every)} End what holds it, or search on another device."
    )


def users(uuid: str | None = None) -> list[User]:
    """Other processes on a card, this process's own or another, the largest first, as far as the driver shows them."""
    name, own = uuid or _uuid(), {os.getpid(), *descendants()}

    def asked(nvml: Any) -> list[User]:
        card = nvml.nvmlDeviceGetHandleByUUID(name)
        found: dict[int, User] = {}
        for shows, tell in (
            (False, nvml.nvmlDeviceGetComputeRunningProcesses),
            (True, nvml.nvmlDeviceGetGraphicsRunningProcesses),
        ):
            for row in tell(card):
                if row.pid and row.pid not in own:  # 0 is of another container
                    found[row.pid] = User(row.pid, _name(row.pid), int(row.usedGpuMemory or 0), shows)
        return sorted(found.values(), key=lambda one: -one.num_bytes)

    return ask(asked) or []


def _wanted_bytes(budget: Budget | None) -> int:
    if budget is None or budget.limit is None:
        return 0
    total = _asked_of_torch(lambda: torch.cuda.get_device_properties().total_memory)
    return int(min(budget.limit, (total or budget.limit) - _QUIET_BYTES) / budget.factor)


def _room_bytes(index: int | None = None) -> int:
    """What the card has left, and what it charges this process; -1 where that is too little for a context."""

    def known() -> int:
        open_context(index)
        free = int(torch.cuda.mem_get_info()[0])
        return free + torch.cuda.memory_reserved() + min(context_bytes(), _CONTEXT_BYTES)

    found = _asked_of_torch(known)
    return -1 if found is None else found


def _asked_of_torch(question: Callable[[], _Answer]) -> _Answer | None:
    """None where there is no memory for the context that it opens."""
    try:
        return question()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _name_of_card() -> str:
    return _asked_of_torch(torch.cuda.get_device_name) or _uuid()


def _uuid() -> str:
    """As NVML knows the card, or the instance of one that is split."""
    uuid = _asked_of_torch(lambda: torch.cuda.get_device_properties().uuid)
    if uuid is None:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    names = [f"{kind}-{uuid}" for kind in ("GPU", "MIG")]
    return next((name for name in names if ask(partial(_is_there, name=name))), names[0])


def _is_there(nvml: Any, name: str) -> bool:
    return nvml.nvmlDeviceGetHandleByUUID(name) is not None


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:  # it has ended, or is in another container
        return "a process"


def _named(every: list[User]) -> str:
    if not every:
        return "The driver does not show who."
    return f"On the device: {', '.join(map(str, every))}."
