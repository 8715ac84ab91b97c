"""Which GPUs there are, found without importing torch or touching a device."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Literal

from ..units import MIB

_UUID = re.compile(r"UUID: ((?:GPU|MIG)-[^)]+)\)")


def visible_gpus() -> tuple[str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` may name: its own entries where it is set, else what ``nvidia-smi -L`` lists.

    A GPU that is split is listed by its MIG instances, of which a process can use one.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name for name in chosen.split(",") if name and name != "-1")
    found = _UUID.findall(_said("-L"))
    instances = [name for name in found if name.startswith("MIG-")]
    return tuple(instances or found)


def gpu_types() -> dict[str, str]:
    """Name and memory of each GPU of this machine, by UUID, in the driver's order."""
    listed = _said("--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits").splitlines()
    rows = [[part.strip() for part in line.split(",")] for line in listed]
    return {row[0]: type_text(row[1], int(row[2]) * MIB) for row in rows if len(row) == 3 and row[2].isdecimal()}


def type_text(name: str, memory_bytes: int) -> str:
    """``NVIDIA H100 80GB HBM3, 80 GiB``: a type of device, as people name it."""
    return f"{name}, {memory_bytes / (1024 * MIB):.0f} GiB"


def split_device(text: str) -> tuple[Literal["cpu", "cuda"], str | None]:
    """torch's device type of ``cuda:A100-SXM4-80GB``, and the part of a device's name and memory.

    Raises:
        ValueError: it is neither.
    """
    kinds: dict[str, Literal["cpu", "cuda"]] = {"cpu": "cpu", "cuda": "cuda"}
    kind, colon, name = text.partition(":")
    if kind not in kinds or (colon and (not name.strip() or name.strip().isdecimal())):
        raise ValueError(
            f"cpu or cuda was expected, or a type of them by a part of its name, such as cuda:A100-SXM4-80GB, but got "
            f"{text!r}"
        )
    return kinds[kind], name.strip() or None


def _said(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
