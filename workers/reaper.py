"""What is left of a cluster whose driver was killed: Ray's agents stay for a minute after everything else has gone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence

from .process import ProcessId, end

__all__ = ["Reaper"]


class Reaper:
    """A process that waits for this one to end, and then ends some others and removes their folder."""

    def __init__(self, processes: Sequence[ProcessId], folder: str | None) -> None:
        """Start it.

        Args:
            processes: to be ended.
            folder: what they wrote, to be removed; None where it is not theirs alone.
        """
        command = [sys.executable, "-P", "-m", __name__, *filter(None, [folder])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        assert self._process.stdin is not None, "asked for above"
        self._process.stdin.writelines(f"{process.pid} {process.start}\n" for process in processes)
        self._process.stdin.flush()

    def close(self) -> None:
        """End what is left of them now, and the reaper."""
        self._process.communicate()


def main() -> None:
    """Read processes until nobody holds the other end of stdin, then end them."""
    end(ProcessId(*map(int, line.split())) for line in sys.stdin.readlines())
    for folder in sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
