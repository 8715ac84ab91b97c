"""What a trial prints: the first and the last of it, so that a flood costs no memory."""

from __future__ import annotations

import os

_KEPT = 32 * 1024
_READ = 256 * 1024


class Capture:
    """Drains a pipe and keeps its first and last 32 KiB."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._head = b""
        self._tail = b""
        self._num_dropped = 0

    def read(self) -> int | None:
        """Take some of what is there: how many bytes; None when there is nothing now, 0 when nobody can write more."""
        try:
            data = os.read(self._pipe, _READ)
        except BlockingIOError:
            return None
        room = _KEPT - len(self._head)
        self._head += data[:room]
        tail = self._tail + data[room:]
        self._tail = tail[-_KEPT:]
        self._num_dropped += len(tail) - len(self._tail)
        return len(data)

    def text(self) -> str:
        """What was printed; a line says where some was left out."""
        gap = f"\n[... {self._num_dropped} bytes left out ...]\n".encode() if self._num_dropped else b""
        return (self._head + gap + self._tail).decode(errors="replace")
