"""Twelve published faults of evaluating, saving and resuming: is each told beforehand, and nothing of it once mended?

    python -m benchmarks.life --keep

Each job runs by itself to the end of what goes wrong, and once more if it resumes, which gives the memory that it
really takes, broken and mended. The budget lies between the two. Then one trial of `--life` judges each: it evaluates
for a second of the set, saves, and has a process resume; it is right if it is over the budget in the phase that goes
wrong (or warns of what each evaluation leaves behind), and within it once mended. Small jobs on a CPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autotune.measure.measurement import EvaluationOptions, LifeOptions, MeasureOptions
from autotune.plan import Budget, Plan
from autotune.script.command import under_launcher
from autotune.searches.verdict import judge
from autotune.techniques import Settings
from autotune.units import MIB
from autotune.workers import Measured, MeasureRequest
from autotune.workers.local import LocalExecutor

from .life_jobs.evaluating import FAULTS, NUM_EVALUATIONS
from .rows import save_rows

JOBS = Path(__file__).parent / "life_jobs"
EVALUATED_S, MOST_S = 1.0, 240.0
PLAIN = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import evaluating
task = getattr(evaluating, sys.argv[2])
model = task.build_model()
optimizer = task.make_optimizer(model)
from torch.utils.data import DataLoader
for batch in DataLoader(task.build_dataset(), task.batch_size):
    optimizer.zero_grad(); task.compute_loss(model, batch).backward(); optimizer.step()
for _ in range(int(sys.argv[3])):
    task.evaluate(model)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


class Job(NamedTuple):
    """One fault, broken or mended."""

    name: str
    phase: str
    """In which it runs out."""
    from_: str
    """The threads."""

    @property
    def is_task(self) -> bool:
        """Whether it is a task file's."""
        return any(fault.__name__ == self.name for fault in FAULTS)

    def task(self, variant: str) -> str:
        """What a trial is asked for."""
        return str(JOBS / f"evaluating.py:{self.name}_{variant}") if self.is_task else str(JOBS / "train.py")

    def command(self, variant: str, *more: str) -> list[str]:
        """What starts the script."""
        return [sys.executable, str(JOBS / "train.py"), self.name, variant, *more]

    def real_bytes(self, variant: str) -> int:
        """The most that it takes by itself."""
        if self.is_task:
            times = str(NUM_EVALUATIONS.get(self.name, 1))
            command = [sys.executable, "-c", PLAIN, str(JOBS), f"{self.name}_{variant}", times]
            return 1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        with tempfile.TemporaryDirectory() as folder:
            runs = 2 if self.phase == "resuming" else 1
            return max(_peak(self.command(variant, "1"), folder) for _ in range(runs))


JOBS_OF = (
    Job("joined", "evaluation", "transformers 8476, 12878"),
    Job("joined_anew", "evaluation", "transformers 25313, 10722"),
    Job("outputs", "evaluation", "Lightning 8453, 8583"),
    Job("logged", "evaluation", "Lightning 14270"),
    Job("large", "evaluation", "unsloth 1147, 5168"),
    Job("graphs", "evaluation", "pytorch-kaldi 41, labelmodels 4"),
    Job("copy", "saving", "ema-pytorch 35"),
    Job("buffer", "saving", "Lightning 21823"),
    Job("tensors", "saving", "Qwen3-TTS 365, kohya_ss 1580"),
    Job("kept", "resuming", "nanoGPT 236, 158"),
    Job("optimizer", "resuming", "transformers 22123, axolotl 219, mmf 185"),
    Job("average", "resuming", "pytorch-image-models 72"),
)


def main() -> None:
    """Print a line for each fault, and how many were told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="some faults, by their names: joined,copy")
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/life-cpu.jsonl")
    arguments = parser.parse_args()
    chosen = [job for job in JOBS_OF if arguments.only is None or job.name in arguments.only.split(",")]
    rows = []
    with LocalExecutor() as executor:
        for job in chosen:
            rows.append(judged(job, executor))
            if arguments.keep:
                save_rows("life", "cpu", rows[-1:])
    told, alarms = sum(row["told"] for row in rows), sum(row["false_alarm"] for row in rows)
    print(f"{told} of {len(rows)} told beforehand, {alarms} false alarms (bar: all, and none)")


def judged(job: Job, executor: LocalExecutor) -> dict[str, Any]:
    """One row, which is printed."""
    real = {variant: job.real_bytes(variant) for variant in ("broken", "mended")}
    budget = Budget(limit=round((real["broken"] + 1.03 * real["mended"]) / 2), device="cpu")
    found = {variant: _trial(job, variant, budget, executor) for variant in real}
    row = {
        "fault": job.name,
        "from": job.from_,
        "phase": job.phase,
        "limit_bytes": budget.limit,
        "real_bytes": real,
        "runs_out": not budget.holds(real["broken"]) and budget.holds(real["mended"]),
        "trial": found,
        "told": found["broken"]["told"] == job.phase,
        "false_alarm": found["mended"]["told"] is not None,
    }
    sizes = {variant: f"{num_bytes / MIB:.0f}" for variant, num_bytes in real.items()}
    print(
        f"{job.phase:10} {job.name:12} broken {sizes['broken']} MiB (by the trial {found['broken']['mib']}), mended "
        f"{sizes['mended']} ({found['mended']['mib']}), budget {(budget.limit or 0) / MIB:.0f}: "
        f"{'told' if row['told'] else 'NOT TOLD'}{', FALSE ALARM' if row['false_alarm'] else ''}: "
        f"{found['broken']['said']}",
        flush=True,
    )
    return row


def _trial(job: Job, variant: str, budget: Budget, executor: LocalExecutor) -> dict[str, Any]:
    """What a trial says of it before it has run out."""
    command = () if job.is_task else tuple(under_launcher(job.command(variant)) or ())
    options = MeasureOptions(
        trial_time_s=2.0,
        enforce=False,
        budget=budget,
        parity_batch=None,
        evaluation=EvaluationOptions(most_s=EVALUATED_S),
        life=LifeOptions(most_s=MOST_S if job.phase == "resuming" else 20 * EVALUATED_S),
    )
    request = MeasureRequest(
        id=job.name,
        task=job.task(variant),
        command=command or None,
        device="cpu",
        fresh=True,
        plan=Plan(settings=Settings(), budget=budget),
        options=options,
        deadline_s=600,
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = executor.ask(request) if job.is_task else _ask_in(folder, request, executor)
    verdict = judge(outcome, budget, 2**40)
    if not isinstance(outcome, Measured):
        return {"told": None, "mib": None, "said": verdict.reason or outcome.kind}
    measurement = outcome.measurement
    leaves = [said for said in measurement.warnings if said.startswith("each evaluation leaves")]
    return {
        "told": measurement.peak.binds if verdict.over_memory else "evaluation" if leaves else None,
        "mib": round(measurement.peak.process / MIB),
        "said": verdict.reason or "; ".join(leaves),
        "phases": {name: round(row.process / MIB) for name, row in measurement.peak.phases.items()},
        "interval": [
            [round(row.low / MIB), round(row.high / MIB)]
            for row in measurement.peak.phases.values()
            if row.low is not None and row.high is not None
        ],
    }


def _ask_in(folder: str, request: MeasureRequest, executor: LocalExecutor) -> Any:
    """In an empty folder, of which the script's trial has a copy."""
    import os

    before = os.getcwd()
    os.chdir(folder)
    try:
        with LocalExecutor() as own:
            return own.ask(request)
    finally:
        os.chdir(before)


def _peak(command: Sequence[str], folder: str) -> int:
    """Bytes of a process and nobody else."""
    measure = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
    measure += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    run = [sys.executable, "-c", measure, *command]
    return 1024 * int(subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True).stdout.split()[-1])


if __name__ == "__main__":
    main()
