"""A file for what is offloaded."""

from __future__ import annotations

import mmap
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


os.register_at_fork(after_in_parent=_note_fork, after_in_child=_note_fork)


class UnnamedFile:
    """It has no name, so that nothing is left of it whatever becomes of the process; room in it is used again.

    Once a process was forked, it reads there too: its parent then writes to another file, and the system frees this one
    when neither has anything there.
    """

    def __init__(self) -> None:
        self.end = 0
        self._file = _opened()
        self._num_forks = _num_forks
        """Before it was opened."""
        self._free: dict[int, list[int]] = {}
        """Places of each size."""

    @classmethod
    def to_write(cls, last: UnnamedFile | None) -> UnnamedFile:
        """The last one, or one that nobody else has."""
        return last if last is not None and last.is_alone else cls()

    @property
    def is_alone(self) -> bool:
        """Whether no other process may read there."""
        return self._num_forks == _num_forks

    def write(self, content: memoryview) -> int:
        """The place of what is written.

        Raises:
            UserError: the disk is full.
        """
        free = self._free.get(len(content))
        place = free.pop() if free else self.end
        self.end = max(self.end, place + -(-len(content) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
        done = 0
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

    def fileno(self) -> int:
        """To map it by; places begin with a page."""
        return int(self._file.fileno())

    def read(self, content: memoryview, place: int) -> None:
        """Fill ``content`` from a place."""
        done = 0
        while done < len(content):
            done += os.preadv(self._file.fileno(), [content[done:]], place + done)

    def give_back(self, place: int, num_bytes: int) -> None:
        """The place may be written again."""
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
