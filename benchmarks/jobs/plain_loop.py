"""A training loop as people write it, over a task file's functions; this package is not imported.

`python benchmarks/jobs/plain_loop.py model.py STEPS`
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

WARM_UP = 5


def main(source: str, num_steps: int) -> None:
    """Train, and print one JSON row: samples/s over ``num_steps`` steps, and the peak."""
    spec = importlib.util.spec_from_file_location("job", source)
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    torch.manual_seed(0)
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    loader = DataLoader(job.build_dataset(), batch_size=job.batch_size, shuffle=True)
    step = num_samples = 0
    while step < WARM_UP + num_steps:
        for batch in loader:
            if step == WARM_UP:
                start, num_samples = time.perf_counter(), 0
            optimizer.zero_grad()
            loss = job.compute_loss(model, batch)
            loss.backward()
            optimizer.step()
            step += 1
            num_samples += len(batch) if isinstance(batch, torch.Tensor) else len(batch[0])
            if step == WARM_UP + num_steps:
                break
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()
    peak_bytes = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    print(json.dumps({"samples_per_s": num_samples / seconds, "peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
