"""A limit on the memory of some processes, by a control group of their own; the kernel kills what takes more."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_IS_V1 = (_V1 / "memory.limit_in_bytes").exists()
_NUMBERS = itertools.count()


def missing() -> str | None:
    """Why there can be none here; None where there can."""
    try:
        with MemoryLimit(2**30):
            return None
    except OSError as reason:
        return f"no control group with a limit on memory can be made: {reason}"


class MemoryLimit:
    """Holds for what is added, and for all that comes of it, until it is left."""

    def __init__(self, most_bytes: int) -> None:
        """Make it.

        Raises:
            OSError: it cannot be made.
        """
        self._path = (_V1 if _IS_V1 else _V2) / f"autotune-faults-{os.getpid()}-{next(_NUMBERS)}"
        self._path.mkdir()
        try:
            self._write("memory.limit_in_bytes" if _IS_V1 else "memory.max", most_bytes)
        except OSError:
            self._path.rmdir()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Move out what is left, and forget the group."""
        for pid in (self._path / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                (self._path.parent / "cgroup.procs").write_text(pid)
        for _ in range(100):
            with suppress(OSError):  # what is killed takes a moment to go
                return self._path.rmdir()
            time.sleep(0.05)
        raise RuntimeError(f"{self._path} is still in use")

    def add(self, *pids: int) -> None:
        """Hold processes to it: what they take from now on counts."""
        for pid in pids:
            self._write("cgroup.procs", pid)

    def num_kills(self) -> int:
        """How many processes the kernel has killed for it."""
        lines = (self._path / ("memory.oom_control" if _IS_V1 else "memory.events")).read_text().splitlines()
        return next(int(value) for name, value in (line.split() for line in lines) if name == "oom_kill")

    def _write(self, name: str, value: int) -> None:
        (self._path / name).write_text(str(value))
