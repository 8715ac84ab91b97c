"""Facts about the device that trials run on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from ..bundle import device_name
from ..device_memory.context import driver_version
from ..techniques import Device
from .errors import DeviceLost
from .processes import kib_fields

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = Path("/proc/meminfo")


def inspect_device(kind: Literal["cpu", "cuda"]) -> Device:
    """The CPU, or the current CUDA device."""
    if kind == "cpu":
        bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return Device(type="cpu", name=device_name("cpu"), memory_bytes=_host_bytes(), bf16=bf16)
    properties = torch.cuda.get_device_properties()
    return Device(
        type="cuda",
        name=device_name("cuda"),
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        driver=driver_version(),
    )


def check_device() -> None:
    """Raises:
    DeviceLost: torch cannot use the CUDA device, in its own words.
    """
    reason = "torch sees no CUDA device"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if torch.cuda.is_available():  # which only warns of a driver that is too old
            return
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip()
    raise DeviceLost(
        f"torch cannot use the GPU: {reason}\nMend that (a newer driver, or a torch that is built for it: "
        "https://pytorch.org), or search with --device cpu."
    )


def available_host_bytes() -> int:
    """Host memory that can still be had: the kernel's estimate, or what the container's limit leaves."""
    available = kib_fields(_MEMORY).get("MemAvailable", _host_bytes())
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return min(available, max(0, limit - (used or 0))) if limit is not None else available


def _host_bytes() -> int:
    total = kib_fields(_MEMORY).get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_bytes("memory.max")
    return min(total, limit) if limit is not None else total


def _cgroup_bytes(name: str) -> int | None:
    """A figure of this container's control group (version 2); None without one, or without a limit."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
