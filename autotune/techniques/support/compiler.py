"""What torch.compile needs of a machine beside torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def lacking_compiler(device_type: str) -> str | None:
    """Why inductor cannot compile on this machine, in words; None where it can."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and (device_type == "cpu" or shutil.which("gcc") is None):
        return f"there is no C++ compiler here ({compiler}: apt-get install g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers, which programs are compiled with, are not installed (apt-get install python3-dev)"
    if device_type == "cuda" and find_spec("triton") is None:
        return "triton, which compiles for CUDA, is not installed (pip install triton)"
    return None
