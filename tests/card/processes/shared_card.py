"""A card that several processes use, in real time; see ``sitecustomize``."""

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
_SAID_S = 0.05
"""A process that computes says so so often."""
_COMPUTES_S = 0.5
"""One that said so no longer ago computes."""


class SharedCard(Card):
    """Says what this process takes of it, and hears it of others."""

    _said: tuple[int, float] = (0, 0.0)

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
        found = []
        for file in _FOLDER.glob("[0-9]*.json"):
            if file.stem == str(os.getpid()) or not _is_alive(file.stem):
                continue
            try:
                row = json.loads(file.read_text())
            except (OSError, ValueError):
                continue
            computes = time.time() - row["at_s"] < _COMPUTES_S
            found.append(Process(int(file.stem), row["num_bytes"], utilization=90 if computes else 0))
        return found

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
        file = _FOLDER / f"{os.getpid()}.json"
        file.with_suffix(".new").write_text(json.dumps({"num_bytes": self.own_bytes, "at_s": time.time()}))
        file.with_suffix(".new").replace(file)


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


_in_place = contextlib.ExitStack()


def put_in_place() -> None:
    """For as long as this process lives."""
    uuid = "12345678-1234-1234-1234-123456789abc"
    card = SharedCard(name="A stand-in", total_bytes=8 * GIB, context_bytes=330 * MIB, uuid=uuid)
    _in_place.enter_context(card.in_place())
    devices.torch_builds = lambda: {"cuda": "13.0"}
