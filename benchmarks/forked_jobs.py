"""Trains one job after the other, each in a fork: a line of stdin has a plan, a task and the number of epochs, one of
stdout the job's exit status. Of ``benchmarks.host``."""

from __future__ import annotations

import os
import sys

import torch

import autotune


def main() -> None:
    """Until stdin ends."""
    torch.set_num_threads(1)  # a fork cannot use the threads of its parent
    for line in sys.stdin:
        plan, task, num_epochs = line.rstrip("\n").split("\t")
        if (pid := os.fork()) == 0:
            training = autotune.apply(autotune.load_plan(plan), autotune.load_task(task))
            for _ in range(int(num_epochs)):
                for batch in training.loader:
                    training.step(batch)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
