"""The least memory in which six jobs train: by the techniques of 2026-11-25, and by today's.

    python -m benchmarks.smallest --keep
    python -m benchmarks.smallest --long --keep   # GPT-2 of 124 M, four texts of 1,024 tokens: predicted, not trained

From the job as it stands, one technique after another takes the kind with the lowest predicted peak of tensors, until
none lowers it: first of the older techniques, then of all. Exact and rounding ones alone. The batch of an optimizer
step stays; where no layer has statistics of a batch, it is whole or a sample at a time. The job as it stands and both
plans then train in fresh processes under each allocator, three times. A plan whose last loss is more than 1 % from the
job's as it stands is not used: it is searched again without the optimizer state of fewest bits. Peak is VmHWM, the
median of the three, less that of a process which has imported the same, has the same data, and trains one linear layer;
the least of the allocators counts. Bar: on five of six, today's is at most 0.7 times the older one's; of the long
GPT-2, tensors at their peak at most 0.35 of the job's as it stands.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
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

BAR, TENSORS_BAR = 0.7, 0.35
_OLDER: dict[str, tuple[str, ...]] = {
    "checkpointing": ("blocks",),
    "layers": ("exact", "rounding"),
    "optimizer_step": ("in_backward",),
}
_STATES = ("bf16", "8bit", "4bit")
"""By their bits."""
_OFFERED = {
    "older": _OLDER,
    "today": {
        **_OLDER,
        "optimizer_state": _STATES,
        "offload": ("activations", "trained"),
        "tiles": ("feed_forward",),
    },
}
_KINDS = {"trained": {"kind": "parameters", "trained": True}}
"""Of those that are offered, what takes more than a kind."""
_ALLOCATORS = {"older": ("system", "tcmalloc"), "today": ("system", "tcmalloc", "mmap")}
_NUM_STEPS, _NUM_RUNS = 5, 3
_MOST_OFF = 0.01
"""Relative, of the last loss."""
_ROWS = dict[str, dict[str, Any]]
_LINEAR = Task(
    lambda: nn.Linear(8, 8),
    lambda: TensorDataset(torch.ones(8, 8)),
    lambda model, batch: model(batch[0]).mean(),
    build_optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=8,
)


def _long() -> Task:
    texts = TensorDataset(torch.randint(0, 50_257, (8, 1024), generator=torch.Generator().manual_seed(0)))
    return dataclasses.replace(JOBS["GPT-2"](), build_dataset=lambda: texts, batch_size=4)


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
            for changed in (without, *({**without, name: _KINDS.get(kind, {"kind": kind})} for kind in kinds)):
                found = None if changed == rows else _tensors(task, changed)
                if found is not None and found < least:
                    rows, least = changed, found
    return rows, least


def _plans(task: Task, states: tuple[str, ...]) -> dict[str, tuple[_ROWS, int]]:
    """Settings and their predicted peak: of the job as it stands, and the least of each set of techniques.

    Args:
        task: the job.
        states: of optimizers, that are offered today.
    """
    batch = task.batch_size or 1
    by_batch = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.build_model().modules())
    starts = [_with_batch(batch, micro) for micro in ((batch,) if by_batch else dict.fromkeys((batch, 1)))]
    found: dict[str, tuple[_ROWS, int]] = {"stock": (starts[0], _tensors(task, starts[0]) or 0)}
    for which, offered in _OFFERED.items():
        offered = offered if which == "older" else {**offered, "optimizer_state": states}
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


def _row(name: str, states: tuple[str, ...] = _STATES) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name}
    empty = {kind: _peak([_trained(name, None, kind) for _ in range(_NUM_RUNS)]) for kind in _ALLOCATORS["today"]}
    for which, (rows, predicted) in _plans(JOBS[name](), states).items():
        runs = {
            kind: [_trained(name, rows, kind) for _ in range(_NUM_RUNS)] for kind in _ALLOCATORS.get(which, ("system",))
        }
        peaks = {kind: (_peak(each) - empty[kind]) / MIB for kind, each in runs.items()}
        kind = min(peaks, key=lambda one: peaks[one])
        last = runs[kind][0]["losses"][-rows["batch"]["accumulate"] :]
        row[which] = {
            "settings": rows,
            "allocator": kind,
            "predicted_tensors_mib": round(predicted / MIB, 1),
            "peak_mib": {one: round(peak, 2) for one, peak in peaks.items()},
            "runs_mib": {one: [round(run["bytes"] / MIB, 2) for run in each] for one, each in runs.items()},
            "last_loss": sum(last) / len(last),
        }
    row["loss_off"] = abs(row["today"]["last_loss"] / row["stock"]["last_loss"] - 1)
    if row["loss_off"] > _MOST_OFF and states:
        print(f"{name}: the loss of {row['today']['settings']} is {row['loss_off']:.1%} off", flush=True)
        return _row(name, states[:-1])
    least = {which: min(row[which]["peak_mib"].values()) for which in ("stock", "older", "today")}
    row["ratio"] = least["today"] / least["older"]
    print(f"{name}: {least} MiB, today over older {row['ratio']:.4f}; {row['today']['settings']}", flush=True)
    return row


def _row_of_tensors() -> dict[str, Any]:
    plans = _plans(_long(), _STATES)
    row: dict[str, Any] = {"model": "GPT-2, 4 x 1,024 tokens", "measured": False}
    for which, (rows, predicted) in plans.items():
        row[which] = {"settings": rows, "predicted_tensors_mib": round(predicted / MIB, 1)}
    row["tensors_ratio"] = plans["today"][1] / plans["stock"][1]
    print(f"{row['model']}, predicted: {row['tensors_ratio']:.3f} of the job as it stands (bar {TENSORS_BAR}); {row}")
    return row


def _peak(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["bytes"] for run in runs)


def main() -> None:
    """Measure each job, and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=JOBS, action="append", help="these alone")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/smallest-cpu.jsonl")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--long", action="store_true", help="the long GPT-2, predicted, in place of the six jobs")
    arguments = parser.parse_args()
    if arguments.process:
        print(json.dumps(_in_process(*json.loads(arguments.process))))
        return
    if arguments.long:
        rows = [_row_of_tensors()]
    else:
        rows = [_row(name) for name in arguments.model or JOBS]
        met = sum(row["ratio"] <= BAR for row in rows)
        print(f"{met} of {len(rows)} at most {BAR} times")
    if arguments.keep:
        save_rows("smallest", "cpu", rows)


if __name__ == "__main__":
    main()
