"""Two processes, or more, that a test file starts as itself, and what each of them found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from autotune.techniques.support.facts import num_processors

needs_two = pytest.mark.skipif(num_processors() < 2, reason="two processes take two processors")


def found_by_two(file: str, folder: Path) -> list[dict[str, Any]]:
    """Run the file with the folder as its argument; it leaves a ``rank-N.json`` of each process there."""
    return told_by(file, folder)[0]


def told_by(file: str, folder: Path, size: int = 2) -> tuple[list[dict[str, Any]], str]:
    """The same of so many processes, and what they printed on stderr."""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    command, variables = [sys.executable, file, str(folder), str(size)], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)], done.stderr


def run_as_two(found_by: Callable[[int], Any], meet_again: bool = True) -> NoReturn:
    """Call it as each of two ranks of one group, or of as many as the second argument says, which leave what they found
    in the folder that is the first.

    Args:
        found_by: what a rank finds, as JSON has it.
        meet_again: each waits for the other at its end.
    """

    size = int(sys.argv[2])

    def in_each(rank: int, folder: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(found_by(rank)))
        if meet_again:
            dist.barrier()
            dist.destroy_process_group()

    sys.exit(fork_a_pair(in_each, sys.argv[1], size))


def fork_a_pair(in_each: Callable[[int, str], None], folder: str, size: int = 2) -> int:
    """Call it as each of two ranks, or more, which begin with all that this process has imported; the first exit code
    of theirs that is not 0."""
    others: list[int] = []
    for rank in range(1, size):
        if not (other := os.fork()):
            in_each(rank, folder)
            return 0
        others.append(other)
    in_each(0, folder)
    return next(filter(None, [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in others]), 0)
