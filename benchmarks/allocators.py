"""What a process is charged, and how long a step takes, under each allocator of a CPU.

    python -m benchmarks.allocators --keep  # under ten minutes

Six transformer blocks 512 wide on 8 × 256 positions with SGD, as they stand and with all blocks recomputed. Each
process makes a step, then three that count; processes of the allocators take turns. Its peak is VmHWM; its time is the
processor's, user and system, of a step.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from typing import Any

import torch
from torch import nn

import autotune
from autotune import Plan
from autotune.measure.processes import own_peak_bytes
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator, installed_allocators
from autotune.units import MIB

from .rows import save_rows

WIDTH, BLOCKS, BATCH = 512, 6, (8, 256)
_BLOCKS: dict[str, dict[str, Any]] = {"stock": {}, "blocks": {"checkpointing": {"kind": "blocks"}}}
_NUM_STEPS = 3


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def train(plan: str, kind: str) -> tuple[float, int]:
    """Seconds of a step, and bytes at the peak, of this process."""
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS))
    settings = Settings.model_validate({**_BLOCKS[plan], "allocator": {"kind": kind}})
    model = autotune.apply_to_model(Plan(settings=settings), nn.Sequential(*layers))
    sgd, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(*BATCH, WIDTH)
    began_s = 0.0
    for step in range(1 + _NUM_STEPS):
        began_s = _processor_s() if step == 1 else began_s
        model(batch).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
    return (_processor_s() - began_s) / _NUM_STEPS, own_peak_bytes()


def _trained(plan: str, kind: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.allocators", "--process", plan, kind]
    environment = os.environ | Allocator(kind=kind).environment()  # type: ignore[arg-type]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds, num_bytes = done.stdout.split()
    return float(seconds), int(num_bytes) / MIB


def main() -> None:
    """Measure each, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/allocators-cpu.jsonl")
    parser.add_argument("--process", nargs=2, metavar=("PLAN", "ALLOCATOR"), help="train in this one")
    arguments = parser.parse_args()
    if arguments.process:
        print(*train(*arguments.process))
        return
    kinds = ["system", *installed_allocators()]
    rows = []
    for plan in _BLOCKS:
        found = {kind: [] for kind in kinds}
        for _ in range(arguments.rounds):
            for kind in kinds:
                found[kind].append(_trained(plan, kind))
        stock = [seconds for seconds, _ in found["system"]]
        for kind, each in found.items():
            ratios = [seconds / other for (seconds, _), other in zip(each, stock, strict=True)]
            peaks = [round(peak) for _, peak in each]
            row = {
                "plan": plan,
                "allocator": kind,
                "peak_mib": peaks,
                "seconds": [round(seconds, 2) for seconds, _ in each],
                "time_ratio": round(statistics.median(ratios), 3),
                "time_spread": [round(min(ratios), 3), round(max(ratios), 3)],
            }
            rows.append(row)
            low, high = row["time_spread"]
            print(
                f"{plan}, {kind}: {min(peaks)} to {max(peaks)} MiB, {row['time_ratio']:.2f} times the system's step "
                f"({low:.2f} to {high:.2f})",
                flush=True,
            )
    if arguments.keep:
        save_rows("allocators", "cpu", rows)


if __name__ == "__main__":
    main()
