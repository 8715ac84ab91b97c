"""Two cards that several processes use: which there are, and what others take of them. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

import pynvml
from told import GIB, Process, Told, nvml

from autotune.workers import devices

FOLDER = Path(os.environ.get("CARD_FOLDER", "/nonexistent"))
UUIDS = tuple(f"12345678-1234-1234-1234-{number:012}" for number in range(2))
"""In NVML's order and in CUDA's."""
LIKE: dict[str, Any] = {"name": "A stand-in", "total_bytes": 8 * GIB}
_NONE = ("", "-1")
"""What ``CUDA_VISIBLE_DEVICES`` names no card by."""
_COMPUTES_S = 0.5
"""A process that said so no longer ago computes."""


def visible() -> list[str]:
    """UUIDs of the cards that CUDA shows this process."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    names = [name.strip() for name in chosen.split(",")]
    return [UUIDS[int(name)] if name.isdecimal() else name.removeprefix("GPU-") for name in names if name not in _NONE]


def others_on(uuid: str) -> list[Process]:
    """Processes that are alive and have said that they use a card."""
    found = []
    for file in FOLDER.glob("[0-9]*.json"):
        if file.stem == str(os.getpid()) or not _is_alive(file.stem):
            continue
        try:
            row = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if row["uuid"] == uuid:
            computes = time.time() - row["at_s"] < _COMPUTES_S
            found.append(Process(int(file.stem), row["num_bytes"], utilization=90 if computes else 0))
    return found


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class _Driver(Told):
    """What a process hears that uses none of them."""

    @property
    def every(self) -> Sequence[Told]:
        """Both."""
        return [Told(**LIKE, uuid=uuid, processes=others_on(uuid)) for uuid in UUIDS]


def put_in_place() -> None:
    """NVML's, until torch is imported."""
    for name, function in nvml(_Driver()).items():
        setattr(pynvml, name, function)
    devices.torch_builds = lambda: {"cuda": "13.0"}
