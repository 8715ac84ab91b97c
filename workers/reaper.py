"""What is left of a cluster whose driver was killed: Ray's agents stay for a minute after everything else has gone."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

from .process import end_all_with

__all__ = ["Reaper"]

_MARK = "AUTOTUNE_CLUSTER"


class Reaper:
    """A process that waits for this one to end, and then ends all that was started since."""

    def __init__(self) -> None:
        """Start it, and mark this process's environment, which what is started from now on inherits."""
        unmarked = {name: value for name, value in os.environ.items() if name != _MARK}
        os.environ[_MARK] = str(uuid.uuid4())
        command = [sys.executable, "-P", "-m", __name__, f"{_MARK}={os.environ[_MARK]}"]
        self._process = subprocess.Popen(command, env=unmarked, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """End what is left now, and the reaper."""
        os.environ.pop(_MARK, None)
        self._process.communicate()


def main(assignment: str) -> None:
    """Wait until nobody holds the other end of stdin, then end every process that carries the mark."""
    sys.stdin.read()
    end_all_with(assignment)


if __name__ == "__main__":
    main(sys.argv[1])
