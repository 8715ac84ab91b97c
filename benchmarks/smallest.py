"""The least memory in which six jobs train: by the techniques of 2026-11-25, and by today's.

    python -m benchmarks.smallest --keep

From the job as it stands, one technique after another takes the kind with the lowest predicted peak of tensors, until
none lowers it: first of the older techniques, then of all. Exact and rounding ones alone. The batch of an optimizer
step stays; where no layer has statistics of a batch, it is whole or a sample at a time. The job as it stands and both
plans then train in fresh processes under each allocator. Peak is VmHWM less that of a process which has imported the
same, has the same data, and trains one linear layer; the least of the allocators counts. Bar: on five of six, today's
is at most 0.7 times the older one's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.utils.data import TensorDataset

import autotune
from autotune import Plan, Task
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.fake_step import Untraceable
from autotune.measure.processes import own_peak_bytes
from autotune.plan import Budget
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator
from autotune.units import MIB

from .advice.jobs import JOBS
from .rows import save_rows

BAR = 0.7
_OLDER: dict[str, tuple[str, ...]] = {
    "checkpointing": ("blocks",),
    "layers": ("exact", "rounding"),
    "optimizer_step": ("in_backward",),
}
_OFFERED = {
    "older": _OLDER,
    "today": {
        **_OLDER,
        "optimizer_state": ("bf16", "8bit", "4bit"),
        "offload": ("activations",),
        "tiles": ("feed_forward",),
    },
}
_ALLOCATORS = {"older": ("system", "tcmalloc"), "today": ("system", "tcmalloc", "mmap")}
_NUM_STEPS = 5
_ROWS = dict[str, dict[str, Any]]
_LINEAR = Task(
    lambda: nn.Linear(8, 8),
    lambda: TensorDataset(torch.ones(8, 8)),
    lambda model, batch: model(batch[0]).mean(),
    build_optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=8,
)


def _with_batch(batch: int, micro: int) -> _ROWS:
    return {"batch": {"micro": micro, "accumulate": batch // micro}}


def _tensors(task: Task, rows: _ROWS) -> int | None:
    """The predicted peak; ``None`` where the settings are refused."""
    try:
        plan = Plan(settings=Settings.model_validate(rows), budget=Budget(device="cpu"))
        return fit_memory_model(plan, task).peak_bytes(rows["batch"]["micro"])
    except (PlanError, ValidationError, Untraceable):
        return None


def _least(task: Task, start: _ROWS, offered: dict[str, tuple[str, ...]]) -> tuple[_ROWS, int]:
    """Settings that no single change makes smaller, and their predicted peak."""
    rows, least, before = start, _tensors(task, start), None
    assert least is not None, start
    while rows != before:
        before = rows
        for name, kinds in offered.items():
            without = {one: row for one, row in rows.items() if one != name}
            for changed in (without, *({**without, name: {"kind": kind}} for kind in kinds)):
                found = None if changed == rows else _tensors(task, changed)
                if found is not None and found < least:
                    rows, least = changed, found
    return rows, least


def _plans(name: str) -> dict[str, tuple[_ROWS, int]]:
    task = JOBS[name]()
    batch = task.batch_size or 1
    by_batch = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.build_model().modules())
    starts = [_with_batch(batch, micro) for micro in ((batch,) if by_batch else dict.fromkeys((batch, 1)))]
    found: dict[str, tuple[_ROWS, int]] = {"stock": (starts[0], _tensors(task, starts[0]) or 0)}
    for which, offered in _OFFERED.items():
        each = [_least(task, start, offered) for start in starts]
        found[which] = min(each, key=lambda one: one[1])
        starts = [rows for rows, _ in each]
    return found


def _in_process(name: str, rows: _ROWS | None) -> dict[str, Any]:
    """Peak and losses of this process; without rows, of one that has no more than the job's imports and data."""
    task = JOBS[name]()
    torch.manual_seed(0)
    if rows is None:
        kept = task.build_dataset()
        with torch.device("meta"):
            task.build_model()
        return {**_in_process_of(_LINEAR, _with_batch(8, 8)), "samples": len(kept)}
    return _in_process_of(task, rows)


def _in_process_of(task: Task, rows: _ROWS) -> dict[str, Any]:
    training = autotune.apply(Plan(settings=Settings.model_validate(rows), budget=Budget(device="cpu")), task)
    endless = itertools.chain.from_iterable(itertools.repeat(training.loader))
    steps = itertools.islice(endless, _NUM_STEPS * training.batch.accumulate)
    losses = [float(training.step(batch).loss) for batch in steps]
    return {"bytes": own_peak_bytes(), "losses": losses}


def _trained(name: str, rows: _ROWS | None, kind: str) -> dict[str, Any]:
    asked = json.dumps([name, rows and {**rows, "allocator": {"kind": kind}}])
    environment = os.environ | Allocator(kind=kind).environment()
    command = [sys.executable, "-m", "benchmarks.smallest", "--process", asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{asked}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name}
    empty = {kind: _trained(name, None, kind)["bytes"] for kind in _ALLOCATORS["today"]}
    for which, (rows, predicted) in _plans(name).items():
        found = {kind: _trained(name, rows, kind) for kind in _ALLOCATORS.get(which, ("system",))}
        kind, least = min(found.items(), key=lambda one: one[1]["bytes"] - empty[one[0]])
        last = least["losses"][-rows["batch"]["accumulate"] :]
        row[which] = {
            "settings": rows,
            "allocator": kind,
            "predicted_tensors_mib": round(predicted / MIB, 1),
            "peak_mib": {one: round((each["bytes"] - empty[one]) / MIB, 1) for one, each in found.items()},
            "last_loss": sum(last) / len(last),
        }
    least = {which: min(row[which]["peak_mib"].values()) for which in ("stock", "older", "today")}
    row["ratio"] = round(least["today"] / least["older"], 3)
    print(f"{name}: {least} MiB, today over older {row['ratio']}; {row['today']['settings']}", flush=True)
    return row


def main() -> None:
    """Measure each job, and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=JOBS, action="append", help="these alone")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/smallest-cpu.jsonl")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        print(json.dumps(_in_process(*json.loads(arguments.process))))
        return
    rows = [_row(name) for name in arguments.model or JOBS]
    met = sum(row["ratio"] <= BAR for row in rows)
    print(f"{met} of {len(rows)} at most {BAR} times")
    if arguments.keep:
        save_rows("smallest", "cpu", rows)


if __name__ == "__main__":
    main()
