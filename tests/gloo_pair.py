"""Two processes that a test file starts as itself, and what each of them found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.techniques.support.facts import num_processors

needs_two = pytest.mark.skipif(num_processors() < 2, reason="two processes take two processors")


def found_by_two(file: str, folder: Path) -> list[dict[str, Any]]:
    """Run the file with the folder as its argument; it leaves a ``rank-N.json`` of each process there."""
    return told_by_two(file, folder)[0]


def told_by_two(file: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The same, and what they printed on stderr."""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    command, variables = [sys.executable, file, str(folder)], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], done.stderr


def fork_a_pair(in_each: Callable[[int, str], None], folder: str) -> int:
    """Call it as each of two ranks, which begin with all that this process has imported; the exit code of both."""
    second = os.fork()
    in_each(int(second == 0), folder)
    return os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) if second else 0
