"""Which GPUs there are, found without importing torch or touching a device."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..device_memory.nvml import ask
from ..units import MIB
from .process import start_child

_DEV = Path("/dev")
_CARDS = "nvidia[0-9]*"
_DRIVERS_FILES = ("nvidiactl", _CARDS, "nvmap")
"""Of NVIDIA's driver: on Linux, and on Jetson."""
_WSL = "dxg"
"""Of Windows' driver, in WSL, whoever made the GPU."""
_AMD = "kfd"
_OTHERS = {"hip": "AMD's GPUs (ROCm)", "xpu": "Intel's GPUs (XPU)"}
_MEASURED = "CPUs can be (--device cpu), and NVIDIA's GPUs."
_NONE = ("", "-1")
"""``CUDA_VISIBLE_DEVICES`` of who wants no GPU."""
_PATIENCE_S = 60.0
"""How long CUDA may take to count its devices."""


class Gpu(NamedTuple):
    """What trials can have: a GPU, or an instance of one that is split (MIG)."""

    uuid: str
    """What ``CUDA_VISIBLE_DEVICES`` may name it."""
    name: str
    """As the vendor calls it; of an instance with its profile, ``NVIDIA A100-SXM4-40GB MIG 1g.5gb``."""
    memory_bytes: int

    @property
    def type(self) -> str:
        """``NVIDIA H100 80GB HBM3, 80 GiB``."""
        return type_text(self.name, self.memory_bytes)


def installed_gpus() -> tuple[Gpu, ...]:
    """All of this machine's, in the order of their places on the bus: those that are split by their instances."""

    def every(nvml: Any) -> tuple[Gpu, ...]:
        return tuple(gpu for at in range(nvml.nvmlDeviceGetCount()) for gpu in _by_nvml(nvml, at))

    # one that shares the machine's memory (Jetson, GB10) has none to tell of
    return ask(every, num_cards=max(1, len([*_DEV.glob(_CARDS)]))) or ()


def visible_gpus() -> tuple[Gpu, ...]:
    """Those that this process may use. What ``CUDA_VISIBLE_DEVICES`` numbers is CUDA's to tell, which counts the
    fastest first where ``CUDA_DEVICE_ORDER`` says nothing; without it, or by UUIDs, NVML's list is complete."""
    installed, chosen = installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return installed or _by_cuda(installed)
    names = [name.strip() for name in chosen.split(",")]
    found = [next((gpu for gpu in installed if name and gpu.uuid.startswith(name)), None) for name in names]
    named = tuple(gpu for gpu in found if gpu is not None)
    return named if len(named) == len(names) else _by_cuda(installed)


def fault_of(gpu: str) -> str | None:
    """Why a GPU is of no use any more: CUDA's driver, asked in a new process, does not count it, or does not answer.

    None where it does, and where there is no such driver.

    Args:
        gpu: as ``CUDA_VISIBLE_DEVICES`` names it.
    """
    if not _has_driver():
        return None
    try:
        if _said_by_cuda(gpu) != "":
            return None
        what = "does not count it any more"
    except subprocess.TimeoutExpired:
        what = "does not answer"
    return (
        f"{gpu}: this GPU has failed: CUDA's driver {what}. The kernel's log (dmesg) may have an Xid with the cause. "
        "Reset the GPU, or restart the machine; then go on with --resume."
    )


def why_no_gpu() -> str | None:
    """Why no trial can have this machine's GPU, and what to do; None where one can, or there is none."""
    builds, chosen = torch_builds(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return f"Apple's GPU (MPS) cannot be measured on. {_MEASURED}"
    if other := next((_OTHERS[name] for name in _OTHERS if name in builds), None):
        return f"this torch is built for {other}, which cannot be measured on. {_MEASURED}"
    installed = installed_gpus()
    if "cuda" in builds and (chosen in _NONE or visible_gpus()):
        return None
    if "cuda" in builds and installed:
        there = ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in installed)
        return f"CUDA sees no GPU with CUDA_VISIBLE_DEVICES={chosen}. Unset it, or name one of these: {there}."
    if name := next((gpu.name for gpu in installed), None) or _file(*_DRIVERS_FILES):
        if "cuda" not in builds:
            return f"torch has no CUDA here, but a GPU is ({name}). Install torch's CUDA build: https://pytorch.org."
        return (
            f"a GPU's driver is here ({name}), but neither NVML nor CUDA finds a GPU by it. See whether `nvidia-smi` "
            "runs; a container wants `--gpus all` and NVIDIA_DRIVER_CAPABILITIES=compute,utility."
        )
    if name := _file(_AMD):
        return f"an AMD GPU is here ({name}), which cannot be measured on. {_MEASURED}"
    return None


def torch_builds() -> dict[str, str]:
    """What the installed torch is built for beside CPUs, with the version: ``{"cuda": "13.0"}``, or hip, or xpu; found
    without importing it. Builds for CPUs alone need not say so in torch's version (conda's, aarch64's)."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(str(spec and spec.origin)).with_name("version.py").read_text(encoding="utf-8")
    except OSError:  # a driver may stand where there is no torch
        return {}
    return dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= '([^']+)'", text, re.MULTILINE))


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


def _by_nvml(nvml: Any, number: int) -> Iterator[Gpu]:
    card = nvml.nvmlDeviceGetHandleByIndex(number)
    try:
        is_split = nvml.nvmlDeviceGetMigMode(card)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:  # this kind of GPU cannot be
        is_split = False
    if not is_split:
        yield _gpu(nvml, card)
        return
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, place)
        except nvml.NVMLError_NotFound:
            continue
        yield _gpu(nvml, instance)


def _gpu(nvml: Any, handle: Any) -> Gpu:
    total_bytes = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), total_bytes)


def _by_cuda(installed: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Those that CUDA counts, in its order, as NVML calls them where it does: asked in a process of its own, which no
    driver's CUDA outlives."""
    if not _has_driver():
        return ()
    known = {gpu.uuid: gpu for gpu in installed}
    try:
        found = [line.split("\t") for line in (_said_by_cuda() or "").splitlines()]
    except subprocess.TimeoutExpired:
        return ()
    return tuple(known.get(row[0]) or Gpu(row[0], row[1], int(row[2])) for row in found)


def _has_driver() -> bool:
    return _file(*_DRIVERS_FILES, _WSL) is not None


def _file(*names: str) -> str | None:
    """The first such device file that there is."""
    return next((str(path) for name in names for path in _DEV.glob(name)), None)


def _said_by_cuda(visible: str | None = None) -> str | None:
    """What ``cuda_driver.py`` prints, of what ``CUDA_VISIBLE_DEVICES`` has or of ``visible`` alone; None where it
    cannot be run, or is ended.

    Raises:
        subprocess.TimeoutExpired: the driver does not answer.
    """
    command = [sys.executable, "-I", str(Path(__file__).with_name("cuda_driver.py"))]
    environment = os.environ if visible is None else {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    try:
        process = start_child(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    except OSError:
        return None
    try:
        said = process.communicate(timeout=_PATIENCE_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # and is not waited for: a driver that is out of order may keep it
        raise
    return said.decode() if process.returncode == 0 else None
