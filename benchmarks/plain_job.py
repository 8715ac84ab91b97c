"""A training script as a user writes one, which says how fast it went and what it was charged.

`autotune run plan.yaml -- python benchmarks/plain_job.py model.py STEPS`
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import autotune

WARM_UP = 10


def main(source: str, num_steps: int) -> None:
    """Train, and print one JSON row: samples/s over ``num_steps`` optimizer steps, and the peak."""
    plan = autotune.load_plan(os.environ["AUTOTUNE_PLAN"])
    training = autotune.apply(plan, autotune.load_task(source))
    step, start, num_samples = 0, 0.0, 0
    while step < WARM_UP + num_steps:
        for batch in training.loader:
            step += training.step(batch).stepped
            if start:  # an epoch's last batch may be smaller
                num_samples += len(batch) if isinstance(batch, torch.Tensor) else len(batch[0])
            elif step == WARM_UP:
                synchronize()
                start = time.perf_counter()
            if step == WARM_UP + num_steps:
                break
    synchronize()
    seconds = time.perf_counter() - start
    print(json.dumps({"samples_per_s": num_samples / seconds, "peak_bytes": peak_bytes()}))


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """VmHWM, or on CUDA the device's used memory, where nothing else runs. Loader workers are not in it."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
