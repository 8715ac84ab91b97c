"""Two cards that several processes use, in real time; see ``sitecustomize``."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import pynvml  # noqa: F401 - with it comes ``two_cards``, which imports it too
from stand_in import Card
from told import Process, Told
from two_cards import FOLDER, LIKE, UUIDS, others_on, visible

from autotune.units import MIB

_SAID_S = 0.05
"""A process that computes says so so often."""
_ROW = 128
"""Bytes, as many each time: a row takes the place of the one before in one go."""


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
        return (visible() or UUIDS)[self._number]

    @uuid.setter
    def uuid(self, value: Any) -> None:
        """It is chosen by its number."""

    @property
    def every(self) -> Sequence[Told]:
        """Both."""
        return [self._of(uuid) for uuid in UUIDS]

    @property
    def visible(self) -> Sequence[Told]:
        """Those that are left to this process."""
        return [self._of(uuid) for uuid in visible()]

    def _of(self, uuid: str) -> Told:
        return self if uuid == self.uuid else Told(**LIKE, uuid=uuid, processes=others_on(uuid))

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
        return others_on(self.uuid)

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
            self._file = os.getpid(), os.open(FOLDER / f"{os.getpid()}.json", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        row = json.dumps({"uuid": self.uuid, "num_bytes": self.own_bytes, "at_s": time.time()})
        os.pwrite(self._file[1], row.ljust(_ROW).encode(), 0)


_in_place = contextlib.ExitStack()


def put_in_place() -> None:
    """For as long as this process lives."""
    _in_place.enter_context(SharedCard(**LIKE, context_bytes=330 * MIB).in_place())
