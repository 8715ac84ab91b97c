"""The CUDA context: memory that a process is charged beside its allocator's reservation."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..units import MIB
from .nvml import ask

_MEMORY = Path("/proc/meminfo")
_QUIET_BYTES = 64 * MIB
"""What readings of one context may differ by while nobody else comes or goes: kernels are loaded as they are used."""


@dataclass
class _Opened:
    """This process's context, where the driver does not say what it takes. Bytes are of the whole device, without what
    the allocator here has reserved."""

    before_bytes: int
    """Before it was opened."""
    bare_bytes: int
    """At once after that, less what was there before."""
    began_bytes: int | None = None
    """As the first optimizer step began."""
    grown_bytes: int | None = None
    """By that step: libraries and kernels are loaded in it."""

    @property
    def known_bytes(self) -> int:
        """By what is known of itself."""
        return self.bare_bytes + (self.grown_bytes or 0)


_opened: _Opened | None = None
"""None until :func:`open_context`, and of a context that somebody else opened."""


def open_context(index: int | None = None) -> None:
    """Open this process's CUDA context, if that is not done; the device's used memory is read first, and at once after.

    Torch opens it in ``set_device`` already (c10/cuda/CUDAFunctions.cpp, ``SetDevice``), so that is called here.

    Args:
        index: the device to take, of those that this process sees; None is the current one.
    """
    global _opened
    is_too_late = _opened is not None or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = None if is_too_late else _used_by_all(index)
    torch.cuda.set_device(torch.cuda.current_device() if index is None else index)
    torch.cuda.synchronize()
    if before is not None and (now := _beside_reservation()) is not None:
        _opened = _Opened(before, max(0, now - before))


def open_when_used(index: Callable[[], int | None]) -> None:
    """Do that as whatever runs here first uses CUDA, and not before: what it sets until then (``PYTORCH_ALLOC_CONF``,
    ``CUDA_VISIBLE_DEVICES``) takes effect. Torch calls what waits for that in ``torch.cuda._lazy_init``."""
    torch.cuda._lazy_call(lambda: open_context(index()))  # type: ignore[no-untyped-call]


def step_begins() -> None:
    """The first optimizer step begins."""
    if _opened is not None and _opened.began_bytes is None:
        _opened.began_bytes = _beside_reservation()


def step_ended() -> None:
    """The first optimizer step has ended."""
    if _opened is None or _opened.began_bytes is None or _opened.grown_bytes is not None:
        return
    now = _beside_reservation()
    _opened.grown_bytes = 0 if now is None else max(0, now - _opened.began_bytes)


def context_bytes() -> int:
    """What the device charges this process beyond the allocator's reservation.

    NVML's figure for this process where it shows it. Where it hides processes (containers, MIG), or has none (a device
    that shares the machine's memory): by how much the device's used memory grew as the context was opened, and in the
    first optimizer step; or since, where that is less. So what others take or give back meanwhile is not counted.
    """
    shown = _shown_for_this_process()
    if shown is not None:
        return max(0, shown - torch.cuda.memory_reserved())
    now = _beside_reservation()
    if _opened is None or now is None:
        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - torch.cuda.memory_reserved())
    since = now - _opened.before_bytes
    return min(_opened.known_bytes, since) if since >= _opened.bare_bytes else _opened.known_bytes


def is_told() -> bool:
    """Whether that is this process's own, and not what all take of the device."""
    return _opened is not None or _shown_for_this_process() is not None


def changed_by_others() -> int:
    """By how many bytes the memory of others on the device has grown since the context was opened, or shrunk; 0 where
    the driver shows what this process takes, and whoever else comes or goes does not matter."""
    now = _beside_reservation()
    if _opened is None or now is None or _shown_for_this_process() is not None:
        return 0
    changed = now - _opened.before_bytes - _opened.known_bytes
    return changed if abs(changed) > _QUIET_BYTES else 0


def driver_version() -> str | None:
    """The NVIDIA driver's version; None where NVML cannot be asked."""
    return ask(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def _beside_reservation() -> int | None:
    used = _used_by_all()
    return None if used is None else used - torch.cuda.memory_reserved()


def _used_by_all(index: int | None = None) -> int | None:
    """Used memory of the whole device, by whomever, read without a context: NVML's, or the machine's where the device
    shares that and NVML has no figure; None where neither is to be had (MIG).

    ``mem_get_info`` would open a context to answer.

    Args:
        index: of those that this process sees; None is the current one.
    """
    found = _shown_for_all(index)
    return _used_of_machine(index) if found is None else found


def _shown_for_all(index: int | None) -> int | None:
    # Not by torch.cuda.device_memory_used, which initializes CUDA: in another thread it would wait for this one, which
    # may be initializing CUDA (torch 2.13, torch/cuda/__init__.py, `_initialization_lock`).
    name = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return ask(lambda nvml: int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(name)).used))


def _used_of_machine(index: int | None) -> int | None:
    if not torch.cuda.get_device_properties(index).is_integrated:
        return None
    fields = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total - available


def _shown_for_this_process() -> int | None:
    name = f"GPU-{torch.cuda.get_device_properties().uuid}"

    def shown(nvml: Any) -> dict[int, int | None]:
        rows = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(name))
        return {row.pid: row.usedGpuMemory for row in rows}

    used = (ask(shown) or {}).get(os.getpid())
    # No process has less than it has reserved: such a figure is another's of that number, or made up (HAMi-core #112).
    return int(used) if used and used > torch.cuda.memory_reserved() else None
