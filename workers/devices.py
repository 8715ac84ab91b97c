"""Which GPUs this process may use, found without importing torch or touching a device."""

from __future__ import annotations

import os
import re
import subprocess

__all__ = ["visible_gpus"]

_UUID = re.compile(r"UUID: ((?:GPU|MIG)-[^)]+)\)")


def visible_gpus() -> tuple[str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` may name: its own entries where it is set, else what ``nvidia-smi -L`` lists.

    A GPU that is split is listed by its MIG instances, of which a process can use one.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name for name in chosen.split(",") if name and name != "-1")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = _UUID.findall(listed)
    instances = [name for name in found if name.startswith("MIG-")]
    return tuple(instances or found)
