"""Two cards that several processes use, in real time; see ``sitecustomize``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

from stand_in import GIB, MIB, Card, Process

from autotune.workers import devices

_FOLDER = Path(os.environ.get("CARD_FOLDER", "/nonexistent"))
_UUIDS = tuple(f"12345678-1234-1234-1234-{number:012}" for number in range(2))
"""In NVML's order and in CUDA's."""
_LIKE: dict[str, Any] = {"name": "A stand-in", "total_bytes": 8 * GIB, "context_bytes": 330 * MIB}
_NONE = ("", "-1")
"""What ``CUDA_VISIBLE_DEVICES`` names no card by."""
_SAID_S = 0.05
"""A process that computes says so so often."""
_ROW = 128
"""Bytes, as many each time: a row takes the place of the one before in one go."""
_COMPUTES_S = 0.5
"""One that said so no longer ago computes."""


class SharedCard(Card):
    """Says what this process takes of it, and hears it of others. It is the first of those that
    ``CUDA_VISIBLE_DEVICES`` leaves this process, until it takes another."""

    _said: tuple[int, float] = (0, 0.0)
    _file: tuple[int, int] = (0, -1)
    """Of a process, by its number: a fork has its own."""
    _number = 0

    @property
    def uuid(self) -> str:  # type: ignore[override]
        """Of the one that this process uses."""
        return (_visible() or _UUIDS)[self._number]

    @uuid.setter
    def uuid(self, value: Any) -> None:
        """It is chosen by its number."""

    @property
    def every(self) -> Sequence[Card]:
        """Both."""
        return [self._of(uuid) for uuid in _UUIDS]

    @property
    def visible(self) -> Sequence[Card]:
        """Those that are left to this process."""
        return [self._of(uuid) for uuid in _visible()]

    def _of(self, uuid: str) -> Card:
        return self if uuid == self.uuid else Card(**_LIKE, uuid=uuid, processes=_others_on(uuid))

    @property
    def number(self) -> int:
        """CUDA's, of the one that this process uses."""
        return self._number

    def take(self, number: int) -> None:
        """Use that one from here on: with its context and its tensors, if it had any."""
        self._number = number

    @property
    def now_s(self) -> float:  # type: ignore[override]
        """The real clock."""
        return time.perf_counter()

    @now_s.setter
    def now_s(self, value: float) -> None:
        if value > time.perf_counter():
            time.sleep(value - time.perf_counter())

    @property
    def processes(self) -> Sequence[Process]:  # type: ignore[override]
        """Others that are alive."""
        return _others_on(self.uuid)

    @processes.setter
    def processes(self, value: Any) -> None:
        """They are those that there are."""

    def host(self, seconds: float) -> None:
        """The host takes the time that it takes."""

    def open(self) -> None:
        """As any, and others hear of it."""
        super().open()
        self._say()

    def _patch_clock(self, patch: Any) -> None:
        """It is the real one."""

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        out = super()._run(function, args, kwargs)
        if self.is_open:
            self._say()
        return out

    def _say(self) -> None:
        num_bytes, said_s = self._said
        if self.own_bytes == num_bytes and time.monotonic() - said_s < _SAID_S:
            return
        self._said = self.own_bytes, time.monotonic()
        if self._file[0] != os.getpid():
            self._file = os.getpid(), os.open(_FOLDER / f"{os.getpid()}.json", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        row = json.dumps({"uuid": self.uuid, "num_bytes": self.own_bytes, "at_s": time.time()})
        os.pwrite(self._file[1], row.ljust(_ROW).encode(), 0)


def _visible() -> list[str]:
    """UUIDs of the cards that CUDA shows this process."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    names = [name.strip() for name in chosen.split(",")]
    return [_UUIDS[int(name)] if name.isdecimal() else name.removeprefix("GPU-") for name in names if name not in _NONE]


def _others_on(uuid: str) -> list[Process]:
    found = []
    for file in _FOLDER.glob("[0-9]*.json"):
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


_in_place = contextlib.ExitStack()


def put_in_place() -> None:
    """For as long as this process lives."""
    _in_place.enter_context(SharedCard(**_LIKE).in_place())
    devices.torch_builds = lambda: {"cuda": "13.0"}
