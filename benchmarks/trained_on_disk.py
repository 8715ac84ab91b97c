"""What weights that train, with their optimizer's state, save and cost on disk.

    python -m benchmarks.trained_on_disk --keep  # five minutes on an idle machine

Twelve encoder layers of 768 features, 4 times 64 positions, AdamW in backward, on one thread. Each plan runs in a
process of its own: the kernel's peak (VmHWM), the most of its two parts from the third step on, and the median step. A
process before the model, and with the model as built, is said beside it. Plans take turns, twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autotune
from autotune import Plan, Task
from autotune.techniques import Settings

from .rows import save_rows

_IN_BACKWARD = {"optimizer_step": {"kind": "in_backward"}}
_DISK = _IN_BACKWARD | {"offload": {"kind": "parameters", "trained": True}}
_MMAP = {"allocator": {"kind": "mmap"}}
PLANS: dict[str, dict[str, Any]] = {
    "in backward": _IN_BACKWARD, "disk": _DISK, "in backward, mmap": _IN_BACKWARD | _MMAP, "disk, mmap": _DISK | _MMAP,
}  # fmt: skip
_FEATURES, _SAMPLES, _POSITIONS, _STEPS = 768, 4, 64, 8


def model() -> nn.Module:
    """Of 66 million weights."""
    layers = (nn.TransformerEncoderLayer(_FEATURES, 12, dropout=0.0, batch_first=True) for _ in range(12))
    return nn.Sequential(*layers)


def measure(key: str) -> dict[str, Any]:
    """One plan, in this process."""
    torch.set_num_threads(1)
    samples = torch.randn(_SAMPLES, _POSITIONS, _FEATURES, generator=torch.Generator().manual_seed(0))
    loss = lambda model, batch: (model(batch) - batch).square().mean()  # noqa: E731
    task = Task(model, lambda: [*samples] * _STEPS, loss, batch_size=_SAMPLES)
    start = _status()
    training = autotune.apply(Plan(settings=Settings.model_validate({"batch": {"micro": _SAMPLES}} | PLANS[key])), task)
    built, most, seconds, processor_s, last = _status(), {"RssAnon": 0, "RssFile": 0}, [], [], 0.0
    done, begun = threading.Event(), threading.Event()

    def watch() -> None:
        begun.wait()
        while not done.wait(0.01):
            now = _status()
            most.update({name: max(value, now[name]) for name, value in most.items()})

    watching = threading.Thread(target=watch)
    watching.start()
    for number, batch in enumerate(training.loader):
        if number == 2:
            begun.set()
        wall, processor = time.perf_counter(), time.process_time()
        last = float(training.step(batch).loss)
        seconds.append(time.perf_counter() - wall)
        processor_s.append(time.process_time() - processor)
    done.set()
    watching.join()
    return {
        "plan": key,
        "weights_mib": sum(one.numel() for one in training.model.parameters()) * 4 >> 20,
        "start_mib": start["VmHWM"], "built_mib": built["VmHWM"], "peak_mib": _status()["VmHWM"],
        "anonymous_mib": most["RssAnon"], "file_mib": most["RssFile"],
        "seconds": round(statistics.median(seconds[2:]), 3),
        "processor_s": round(statistics.median(processor_s[2:]), 3),
        "loss": last,
    }  # fmt: skip


def _status() -> dict[str, int]:
    """MiB by the kernel's names."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0][:-1]: int(row[1]) >> 10 for row in rows if row[0] in ("VmHWM:", "RssAnon:", "RssFile:")}


def main() -> None:
    """Measure, print, and maybe keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=PLANS, help="this one, in this process, as a line of JSON")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="add the rows to results/trained-on-disk-cpu.jsonl")
    options = parser.parse_args()
    if options.plan:
        print(json.dumps(measure(options.plan)))
        return
    rows = []
    for key in [*PLANS] * options.rounds:
        command = [sys.executable, "-m", "benchmarks.trained_on_disk", "--plan", key]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(rows[-1], flush=True)
    if options.keep:
        save_rows("trained-on-disk", "cpu", rows)


if __name__ == "__main__":
    main()
