"""What NVML and ``nvidia-smi`` tell of a card that stands in for one; imports no torch.

A command that trains nothing asks for no more of a card than this.
"""

from __future__ import annotations

import os
import types
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

from autotune.units import MIB

if TYPE_CHECKING:
    import pytest

GIB = 1024 * MIB


@dataclass(frozen=True)
class Process:
    """Another process on the card."""

    pid: int
    num_bytes: int
    name: str = "python"
    is_graphics: bool = False
    utilization: int = 0
    """Percent of the time."""


@dataclass
class Told:
    """A card, as its driver tells of it to a process that does not use it."""

    name: str = "NVIDIA A100-SXM4-40GB"
    total_bytes: int = 40 * GIB
    capability: tuple[int, int] = (8, 0)
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    driver: str = "580.65.06"
    processes: Sequence[Process] = ()
    """Others that use the card."""
    has_nvml: bool = True
    has_smi: bool = True
    pids_hidden: bool = False
    """In a container: NVML shows this process's memory under no pid of its own."""
    is_mig: bool = False
    """This process has one instance of a card: NVML does not tell its memory by the card's handle."""
    is_unified: bool = False
    """NVML tells no bytes, and the host uses the same memory."""
    clock_mhz: int = 1410
    most_clock_mhz: int = 1410
    throttle_reasons: int = 0
    """As ``pynvml.nvmlClocksEventReason*`` has them."""
    power_w: float = 250.0
    power_limit_w: float = 400.0
    default_power_limit_w: float = 400.0
    temperature_c: int = 50

    is_open = False
    """Whether this process uses it."""
    own_bytes = 0
    """What it charges this process."""
    now_s = 0.0
    """A clock."""

    @property
    def every(self) -> Sequence[Told]:
        """The machine's, by NVML's numbers."""
        return (self,)

    @property
    def used_bytes(self) -> int:
        """By everybody, this process included."""
        return sum(one.num_bytes for one in self.processes) + self.own_bytes

    @property
    def free_bytes(self) -> int:
        """Of the whole card."""
        return max(0, self.total_bytes - self.used_bytes)


def nvml(card: Told) -> dict[str, Callable[..., Any]]:
    """Functions of ``pynvml``, by name."""

    def error(code: int) -> BaseException:
        return pynvml.NVMLError(code)

    def there() -> None:
        if not card.has_nvml:
            raise error(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def by_uuid(name: Any) -> Told:
        there()
        name = name.decode() if isinstance(name, bytes) else name
        found = [one for one in card.every if name == _named(one)]
        if not found:
            raise error(pynvml.NVML_ERROR_NOT_FOUND)
        return found[0]

    def by_index(index: int) -> Told:
        there()
        if index >= len(card.every):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return card.every[index]

    def memory(handle: Told) -> Any:
        there()
        if handle.is_unified:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return types.SimpleNamespace(total=handle.total_bytes, used=handle.used_bytes, free=handle.free_bytes)

    def processes(handle: Told, is_graphics: bool) -> list[Any]:
        there()
        rows = [(one.pid, one.num_bytes) for one in handle.processes if one.is_graphics == is_graphics]
        if handle.is_open and not is_graphics:
            rows.append((os.getpid(), handle.own_bytes))
        unknown = handle.is_unified or handle.is_mig
        return [
            types.SimpleNamespace(pid=0 if handle.pids_hidden else pid, usedGpuMemory=None if unknown else num_bytes)
            for pid, num_bytes in rows
        ]

    def told(value: Callable[[Told], Any]) -> Callable[..., Any]:
        def read(handle: Told, *_: Any) -> Any:
            there()
            return value(handle)

        return read

    def throttled(handle: Told) -> int:
        return handle.throttle_reasons

    return {
        "nvmlInit": there,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: (there(), card.driver)[1],
        "nvmlDeviceGetCount": lambda: (there(), len(card.every))[1],
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: processes(handle, False),
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: processes(handle, True),
        "nvmlDeviceGetName": told(lambda handle: handle.name),
        "nvmlDeviceGetUUID": told(lambda handle: f"GPU-{handle.uuid}"),
        "nvmlDeviceGetMigMode": told(lambda handle: (int(handle.is_mig), int(handle.is_mig))),
        "nvmlDeviceGetClockInfo": told(lambda handle: handle.clock_mhz),
        "nvmlDeviceGetMaxClockInfo": told(lambda handle: handle.most_clock_mhz),
        "nvmlDeviceGetCurrentClocksThrottleReasons": told(throttled),
        "nvmlDeviceGetCurrentClocksEventReasons": told(throttled),
        "nvmlDeviceGetPowerUsage": told(lambda handle: round(handle.power_w * 1000)),
        "nvmlDeviceGetEnforcedPowerLimit": told(lambda handle: round(handle.power_limit_w * 1000)),
        "nvmlDeviceGetPowerManagementDefaultLimit": told(lambda handle: round(handle.default_power_limit_w * 1000)),
        "nvmlDeviceGetTemperature": told(lambda handle: handle.temperature_c),
        "nvmlDeviceGetUtilizationRates": told(
            lambda handle: types.SimpleNamespace(gpu=sum(one.utilization for one in handle.processes), memory=0)
        ),
        "nvmlDeviceGetProcessUtilization": told(
            lambda handle: [
                types.SimpleNamespace(
                    pid=0 if handle.pids_hidden else pid, smUtil=share, timeStamp=int(card.now_s * 1e6)
                )
                for pid, share in (*((one.pid, one.utilization) for one in handle.processes), (os.getpid(), 50))
            ]
        ),
    }


def _named(card: Told) -> str:
    return f"{'MIG' if card.is_mig else 'GPU'}-{card.uuid}"


def put_smi(card: Told, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """An ``nvidia-smi`` for this process and those that it starts: ``-L`` and ``--query-gpu`` as this package calls
    them, told of the card as it is now. Without ``has_smi``, there is none."""
    program = folder / "nvidia-smi"
    if card.has_smi:
        cards = card.every
        listed = "\n".join(f"GPU {at}: {one.name} (UUID: GPU-{one.uuid})" for at, one in enumerate(cards))
        rows = "\n".join(f"GPU-{one.uuid}, {one.name}, {one.total_bytes // MIB}" for one in cards)
        program.write_text(
            f"#!/bin/sh\ncase \"$1\" in -L) cat <<'END'\n{listed}\nEND\n;; *) cat <<'END'\n{rows}\nEND\n;; esac\n"
        )
        program.chmod(0o755)
    patch.setenv("PATH", str(folder), prepend=os.pathsep)
