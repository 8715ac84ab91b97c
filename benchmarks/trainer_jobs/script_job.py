"""A script that knows nothing of plans: `python -m benchmarks.trainer_jobs.script_job cnn OUT STEPS --batch-size 32
--grad-accum 2`, as it is or under `autotune run`."""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader

from .models import build_dataset, build_model, build_optimizer, task_of
from .timed import Timed

__all__ = ["main", "task_of"]


def main() -> None:
    """Train as the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("out")
    parser.add_argument("steps", type=int)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--grad-accum", type=int, required=True)
    flags = parser.parse_args()
    torch.manual_seed(0)
    model = build_model(flags.case).train()
    optimizer = build_optimizer(model.parameters())
    loader = DataLoader(build_dataset(flags.case), batch_size=flags.batch_size, shuffle=True)
    with Timed(flags.out, flags.steps, flags.batch_size * flags.grad_accum) as timed:
        for number, batch in enumerate(loader, 1):
            loss = model(**batch)["loss"]
            timed.losses.append(loss.item())  # a kept tensor would pin the heap around it
            (loss / flags.grad_accum).backward()
            if number % flags.grad_accum == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
