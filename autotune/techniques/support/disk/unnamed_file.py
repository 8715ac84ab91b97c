"""A file for what is offloaded."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....errors import UserError
from ....units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor


_num_forks = 0


def _note_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_parent=_note_fork)


class UnnamedFile:
    """It has no name, so that nothing is left of it whatever becomes of the process; room in it is used again, but
    what a forked process may still read."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.end = 0
        self._file = _opened()
        self._free: dict[int, list[int]] = {}
        """Places of each size."""
        self._written: dict[int, int] = {}
        """After how many forks, by place."""

    def write(self, content: memoryview) -> int:
        """The place of what is written.

        Raises:
            UserError: the disk is full.
        """
        free = self._free.get(len(content))
        place = free.pop() if free else self.end
        self.end = max(self.end, place + len(content))
        self._written[place], done = _num_forks, 0
        try:
            while done < len(content):
                done += os.pwrite(self._file.fileno(), content[done:], place + done)
        except OSError as error:
            self.give_back(place, len(content))
            raise UserError(
                f"settings.offload: what is offloaded cannot be written to {tempfile.gettempdir()}, where it takes "
                f"{format_bytes(self.end)}: {error.strerror}. Set TMPDIR to a folder on a disk with more room, or use "
                "kind: none."
            ) from None
        return place

    def read(self, content: memoryview, place: int) -> None:
        """Fill ``content`` from a place."""
        done = 0
        while done < len(content):
            done += os.preadv(self._file.fileno(), [content[done:]], place + done)

    def give_back(self, place: int, num_bytes: int) -> None:
        """The place may be written again."""
        if self._written.pop(place) == _num_forks:
            self._free.setdefault(num_bytes, []).append(place)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of uint8 on the CPU."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # it has a buffer, which numpy's stub does not say


def _opened() -> Any:
    """The file.

    Raises:
        UserError: it would lie in memory.
    """
    file = tempfile.TemporaryFile(prefix="autotune-offload-", buffering=0)  # noqa: SIM115 - as long as the model
    device = os.fstat(file.fileno()).st_dev
    ours = f"{os.major(device)}:{os.minor(device)}"
    mounts = Path("/proc/self/mountinfo")  # Linux's
    rows = (line.split() for line in (mounts.read_text().splitlines() if mounts.exists() else ()))
    if any(row[2] == ours and row[row.index("-") + 1] == "tmpfs" for row in rows):
        file.close()
        raise UserError(
            f"settings.offload: {tempfile.gettempdir()} lies in memory (tmpfs), which offloading is to save. Set "
            "TMPDIR to a folder on a disk."
        )
    return file
