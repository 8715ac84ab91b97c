"""Whether a plan gives a framework's job what `autotune verify` says of it.

    python -m benchmarks.trainers [--keep] [--case cnn] [--trainer lightning] [--rounds 5]

For a small CNN and a small GPT, one fixed plan (bf16, one block recomputed, memory-saving layers, two micro-batches to
an optimizer step), and each of transformers' Trainer, Accelerate, Lightning, Ray Train and `autotune run -- python -m
script`: the framework's own job, in a process of its own, and a trial in a fresh interpreter as `autotune verify` runs
it, of the job as a task that imports the same; in turn, round by round. Each job times its own optimizer steps and
reads its own peak. Bars: speed at least 0.95 of the trial's, peak within 3 %, at the median over the rounds.

With `--launcher`: a script under the launcher without a plan beside the script alone. Bars: 1.01 of the time and of the
peak at most, at the median; losses equal to the bit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.plan import Plan
from autotune.script.command import under_launcher
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, inspect
from autotune.searches.time_budget import TimeBudget
from autotune.workers import Executor
from autotune.workers.local import LocalExecutor

from .honesty import run_trial
from .rows import HERE, save_rows
from .trainer_jobs.models import ACCUMULATE, MICRO, plan_of

SPEED_BAR, PEAK_BAR, LAUNCHER_BAR = 0.95, 0.03, 1.01
TRAINERS = {
    "transformers": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "ray_train": ("ray", "pandas", "pyarrow"),
    "script": (),
}
"""What each imports."""


def main() -> None:
    """Measure both ways and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=MICRO, action="append", help="default: both")
    parser.add_argument("--trainer", choices=TRAINERS, action="append", help="default: all that are installed")
    parser.add_argument("--launcher", action="store_true", help="the launcher without a plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/")
    flags = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in flags.case or MICRO:
            if flags.launcher:
                rows += launched(case, folder, flags.rounds, flags.steps)
            else:
                rows += trained(case, folder, flags.trainer or installed(), flags.rounds, flags.steps)
    if flags.keep:
        print(save_rows("launcher" if flags.launcher else "trainers", "cpu", rows))


def installed() -> list[str]:
    """The trainers that can be imported here; the others are named."""
    found = []
    for name, needs in TRAINERS.items():
        lacking = [one for one in needs if importlib.util.find_spec(one) is None]
        if lacking:
            print(f"{name}: left out, since {' and '.join(lacking)} cannot be imported here", flush=True)
        else:
            found.append(name)
    return found


def trained(case: str, folder: Path, trainers: list[str], rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """A row for each trainer: samples/s and peak of its job and of the trial, round by round, and their ratios."""
    plan = plan_of(case)
    plan.save(folder / f"{case}.yaml")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
    with LocalExecutor() as executor:
        requests = {name: requests_of(name, case, folder, plan, executor) for name in trainers}
        for number in range(rounds):
            for name in trainers:
                job = run_job(name, case, folder, num_steps)
                share_s = num_steps * MICRO[case] * ACCUMULATE / job["samples_per_s"]
                measured = {"enforce": False, "parity_batch": None}
                trial = run_trial(executor, requests[name], plan.settings, share_s, measured)
                found[name].append({"round": number, "job": job, "trial": trial["trial"]})
    return [row_of(name, case, found[name], plan) for name in trainers]


def requests_of(name: str, case: str, folder: Path, plan: Plan, executor: Executor) -> Requests:
    """The job as a task, in a file of its own, and what makes requests of it."""
    file = folder / f"{name}_{case}.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(HERE.parent)!r})\n"
        f"from benchmarks.trainer_jobs.{name}_job import task_of\ntask = task_of({case!r})\n"
    )
    options = SearchOptions(task=str(file), device="cpu", allow_split=True)
    return Requests(str(file), 0, plan.budget, inspect(options, executor, TimeBudget(1.0, None)))


def run_job(name: str, case: str, folder: Path, num_steps: int) -> dict[str, Any]:
    """The framework's own job, with the plan."""
    out, plan, steps = str(folder / "job.json"), str(folder / f"{case}.yaml"), str(num_steps)
    job = [sys.executable, "-m", f"benchmarks.trainer_jobs.{name}_job", case]
    if name == "script":
        script = [*job, out, steps, "--batch-size", "{batch.micro}", "--grad-accum", "{batch.accumulate}"]
        return said([sys.executable, "-m", "autotune", "run", plan, "--", *script], out)
    return said([*job, plan, out, steps], out)


def said(command: list[str], out: str) -> dict[str, Any]:
    """The row that a job has written."""
    Path(out).unlink(missing_ok=True)
    done = subprocess.run(command, cwd=HERE.parent, env=paths(), capture_output=True, text=True)
    if not Path(out).exists():
        sys.exit(f"{' '.join(command)} measured nothing:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    row: dict[str, Any] = json.loads(Path(out).read_text())
    return row


def paths() -> dict[str, str]:
    """This environment, in which the benchmarks can be imported."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}


def row_of(name: str, case: str, rounds: list[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """Print one trainer's ratios, job over trial: the median and the range; return them with what they are of."""
    ratios = {
        what: [one["job"][what] / one["trial"][what] for one in rounds] for what in ("samples_per_s", "peak_bytes")
    }
    speed, peak = (statistics.median(ratios[what]) for what in ("samples_per_s", "peak_bytes"))
    holds = speed >= SPEED_BAR and abs(peak - 1) <= PEAK_BAR
    print(
        f"{name}, {case}: {spread(ratios['samples_per_s'])} of verify's samples/s, {spread(ratios['peak_bytes'])} of "
        f"its peak, {len(rounds)} rounds: {'within' if holds else 'OUTSIDE'} the bars",
        flush=True,
    )
    for one in rounds:
        del one["job"]["losses"]
    versions = {one: importlib.metadata.version(one) for one in TRAINERS[name]}
    settings = plan.settings.model_dump(mode="json", exclude_defaults=True)
    return {"trainer": name, "case": case, "versions": versions, "settings": settings, "rounds": rounds}


def spread(ratios: list[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def launched(case: str, folder: Path, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """The row of a script under the launcher, without a plan, beside the script alone."""
    out = str(folder / "job.json")
    flags = ["--batch-size", str(MICRO[case]), "--grad-accum", str(ACCUMULATE)]
    alone = [sys.executable, "-m", "benchmarks.trainer_jobs.script_job", case, out, str(num_steps), *flags]
    under = under_launcher(alone)
    assert under is not None, "it is a script that Python runs"
    found = []
    for number in range(rounds):
        order = [("alone", alone), ("launched", under)]
        found.append({name: said(command, out) for name, command in (order if number % 2 else order[::-1])})
    times = [one["alone"]["samples_per_s"] / one["launched"]["samples_per_s"] for one in found]
    peaks = [one["launched"]["peak_bytes"] / one["alone"]["peak_bytes"] for one in found]
    is_equal = all(one["launched"].pop("losses") == one["alone"].pop("losses") for one in found)
    holds = is_equal and max(statistics.median(times), statistics.median(peaks)) <= LAUNCHER_BAR
    print(
        f"launcher, {case}: {spread(times)} of the script's time, {spread(peaks)} of its peak, losses "
        f"{'equal' if is_equal else 'NOT equal'} to the bit, {rounds} rounds: {'within' if holds else 'OUTSIDE'} the "
        f"bar of {LAUNCHER_BAR}",
        flush=True,
    )
    return [{"case": case, "rounds": found, "equal_losses": is_equal}]


if __name__ == "__main__":
    main()
