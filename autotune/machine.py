"""What a machine's devices are called."""

from __future__ import annotations

import platform
from pathlib import Path


def device_name(kind: str) -> str:
    """As the vendor calls it: the CPU, or the current CUDA device."""
    if kind == "cuda":
        import torch

        return str(torch.cuda.get_device_properties().name)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
