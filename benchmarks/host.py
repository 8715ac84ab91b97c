"""Whether jobs stay within their host budgets: 50 plans of 0 to 8 loader workers.

    python -m benchmarks.host --keep

Five datasets (small samples, large ones, an array that all processes share, a decoder's buffer in each worker, a list
of Python objects), each with ten choices of workers and prefetching. A trial measures each. The tightest host budget
that admits it is its peak with the margin of 3 %. Then a job applies the plan and trains two epochs, and all of its
processes are looked at from outside, four times a second: their proportional sizes (PSS) of anonymous and shared
memory, shared memory that nobody maps, and the first process's file pages. Jobs are forked from a process that has
imported torch, whose pages count as far as they map them. Bar: 0 of 50 over. Beside it stands what counting the
private memory of each worker alone, or whole resident sets, would have said.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.measure import MeasureOptions
from autotune.measure.processes import descendants, kib_fields, stat_of
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.data_loading import DataLoading
from autotune.units import MIB
from autotune.workers import Measured, MeasureRequest
from autotune.workers.local import LocalExecutor

from .rows import save_rows

MARGIN, BATCH, LENGTH, EPOCHS = 0.03, 16, 384, 2
CHOICES = ((0, None), (1, 2), (2, 2), (2, 4), (3, 2), (4, 2), (4, 4), (5, 2), (6, 2), (8, 2))
"""Workers, and batches that each has ready."""
DATASETS = {
    "small": "def read(index): return torch.randn(256)",
    "large": "def read(index): return torch.randn(2**17)",
    "shared array": "ARRAY = torch.randn(2**25)\ndef read(index): return ARRAY[index * 256:(index + 1) * 256].clone()",
    "decoder": (
        "BUFFER = []\n"
        "def read(index):\n"
        "    if not BUFFER: BUFFER.append(torch.ones(2**23))\n"
        "    return torch.randn(256)"
    ),
    "objects": (
        "ROWS = [[float(i + j) for j in range(256)] for i in range(4096)]\n"
        "def read(index): return torch.tensor(ROWS[index % 4096])"
    ),
}
TASK = """
import torch
from torch import nn
{read}
class Data(torch.utils.data.Dataset):
    def __len__(self): return {length}
    def __getitem__(self, index): return read(index)
def build_model(): return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
def build_dataset(): return Data()
def compute_loss(model, batch): return model(batch[:, :256]).square().mean()
batch_size = {batch}
"""


def main() -> None:
    """Measure, run, and print each plan's row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=tuple(DATASETS), action="append", help="default: all")
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/host-cpu.jsonl")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, LocalExecutor() as executor, Jobs() as jobs:
        for number, prefetch in CHOICES:
            for name in arguments.dataset or DATASETS:
                task = Path(folder, f"{name.replace(' ', '_')}.py")
                task.write_text(TASK.format(read=DATASETS[name], length=LENGTH, batch=BATCH))
                rows.append({"dataset": name, **compare(executor, jobs, task, number, prefetch)})
                print(line(rows[-1]), flush=True)
                if arguments.keep:
                    save_rows("host", "cpu", rows[-1:])
    over = {name: sum(row["job_bytes"] > row[name] * (1 + MARGIN) for row in rows) for name in COUNTED}
    print(f"{len(rows)} plans: {over['trial_bytes']} over (bar 0); by private memory alone {over['private_bytes']}")
    room = sorted(row["trial_bytes"] / row["job_bytes"] for row in rows)
    print(f"trial over job: {room[0]:.3f} to {room[-1]:.3f}, {room[len(room) // 2]:.3f} at the median")


COUNTED = ("trial_bytes", "private_bytes")


def compare(executor: LocalExecutor, jobs: Jobs, task: Path, number: int, prefetch: int | None) -> dict[str, Any]:
    """One plan: what its trial took, and its job."""
    loading = DataLoading(num_workers=number, prefetch_factor=prefetch)
    plan = Plan(settings=Settings(batch=Batch(micro=BATCH), data_loading=loading), budget=Budget(device="cpu"))
    request = MeasureRequest(
        id=f"host-{number}",
        task=str(task),
        device="cpu",
        plan=plan,
        options=MeasureOptions(trial_time_s=1.0, parity_batch=None),
    )
    outcome = executor.ask(request)
    assert isinstance(outcome, Measured), outcome
    peak, path = outcome.measurement.peak, task.with_name("plan.yaml")
    plan.save(path)
    job = jobs.run(path, task)
    workers = peak.workers or 0
    return {
        "workers": number,
        "prefetch": prefetch,
        "trial_bytes": peak.process,
        "workers_bytes": workers,
        "private_bytes": peak.process - workers + job["private_bytes"],
        "job_bytes": job["bytes"],
        "resident_bytes": job["resident_bytes"],
    }


class Jobs:
    """Runs jobs one after the other, each in a fork of a process that has imported torch."""

    def __enter__(self) -> Jobs:
        command = [sys.executable, str(Path(__file__).with_name("forked_jobs.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, plan: Path, task: Path) -> dict[str, int]:
        """The largest of each figure while a job trains."""
        assert self._process.stdin is not None, "it is piped"
        assert self._process.stdout is not None, "likewise"
        self._process.stdin.write(f"{plan}\t{task}\t{EPOCHS}\n")
        self._process.stdin.flush()
        most: dict[str, int] = {}
        while not select.select([self._process.stdout], [], [], 0.25)[0]:
            for name, value in seen(self._process.pid).items():
                most[name] = max(most.get(name, 0), value)
        assert self._process.stdout.readline() == "0\n", "the job failed"
        return most


def seen(pid: int) -> dict[str, int]:
    """Bytes of a process and of all below it, now. They stand still meanwhile: where one is forked between two looks,
    what it shares would count twice."""
    pids: list[int] = []
    while (found := [pid, *descendants(pid)]) != pids or not all(map(stands, pids)):
        pids = found
        signal_all(pids, signal.SIGSTOP)
    try:
        return figures(pid, pids)
    finally:
        signal_all(pids, signal.SIGCONT)


def stands(pid: int) -> bool:
    """Whether it is stopped, or has ended: one that is being forked goes on until there is a child."""
    return stat_of(pid)[:1] in ([], ["T"], ["Z"])


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """To each that is there."""
    for one in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


def figures(pid: int, pids: list[int]) -> dict[str, int]:
    """What they take."""
    rows = [fields for one in pids if (fields := kib_fields(Path(f"/proc/{one}/smaps_rollup")))]
    shared = sum(row["Pss_Shmem"] for row in rows)
    files = max(kib_fields(Path(f"/proc/{one}/status")).get("RssFile", 0) for one in pids[:2])
    below = rows[2:]  # the first forks jobs, and what it alone maps is none of theirs; the second is one
    return {
        "bytes": sum(row["Pss_Anon"] for row in rows)
        - rows[0]["Private_Dirty"]
        + max(shared, opened_bytes(pids))
        + files,
        "private_bytes": sum(row["Private_Clean"] + row["Private_Dirty"] for row in below),
        "resident_bytes": sum(row["Rss"] for row in rows),
    }


def opened_bytes(pids: list[int]) -> int:
    """Shared memory without a name that any of them has open."""
    found: dict[int, int] = {}
    device = os.stat("/dev/shm").st_dev
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                status = path.stat()
            except OSError:
                continue
            if status.st_dev == device and status.st_nlink == 0:
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    ready = f", {row['prefetch']} ready" if row["prefetch"] else ""
    verdict = "OVER" if row["job_bytes"] > row["trial_bytes"] * (1 + MARGIN) else "within"
    return (
        f"{row['dataset']}, {row['workers']} workers{ready}: the trial took {row['trial_bytes'] / MIB:.0f} MiB "
        f"({row['workers_bytes'] / MIB:.0f} of workers), the job {row['job_bytes'] / MIB:.0f}: {verdict}; "
        f"private memory would say {row['private_bytes'] / MIB:.0f}, resident sets {row['resident_bytes'] / MIB:.0f}"
    )


if __name__ == "__main__":
    main()
