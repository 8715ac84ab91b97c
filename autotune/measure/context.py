"""The CUDA context: memory that a process is charged beside its allocator's reservation."""

from __future__ import annotations

import os

import torch

_used_before: int | None = None
"""What the device's other users took before this process opened its context; None until :func:`open_context`."""


def open_context() -> None:
    """Open this process's CUDA context; the device's used memory is read first, where NVML can be asked."""
    global _used_before
    _used_before = _used_by_all()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def context_bytes() -> int:
    """What the device charges this process beyond the allocator's reservation.

    NVML's figure for this process where it shows it. Where it hides processes (containers, MIG): the device's used
    memory now, less what was used before this process came, on a device that no one else has come to since.
    """
    charged = _shown_for_this_process()
    if charged is None:
        now = _used_by_all()
        if now is not None and _used_before is not None:
            charged = now - _used_before
        else:
            free, total = torch.cuda.mem_get_info()
            charged = total - free
    return max(0, charged - torch.cuda.memory_reserved())


def driver_version() -> str | None:
    """The NVIDIA driver's version; None where NVML cannot be asked."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _used_by_all() -> int | None:
    """NVML's used memory of the whole device, which needs no context; None where it cannot be asked (MIG)."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        return int(torch.cuda.device_memory_used())
    except (RuntimeError, pynvml.NVMLError):
        return None


def _shown_for_this_process() -> int | None:
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        shown = {row.pid: row.usedGpuMemory for row in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except pynvml.NVMLError:
        return None
    used = shown.get(os.getpid())
    return int(used) if used else None
