"""What a cut by hand comes to as it is trained further: with a teacher and without one, and beside the whole model.

    python -m benchmarks.recovery --part teacher [--job mlp]  # 1 to 5 minutes a job, on one thread
    python -m benchmarks.recovery --part job [--job mlp]      # 2 to 10 minutes a job, on one thread

*teacher*: a cut recovers as in a search, by the task's loss alone and with ``--distill``, on the same batches from each
seed. Both are judged by the examples that neither has trained on, and compared example by example. A teacher gains
where the mean over the seeds is above 0 by more than twice its standard error over examples and seeds.

*job*: the job with a plan (``--plan``, or one that cuts ``--ratio`` of each width) and the job as it stands go on from
the same weights, by ``autotune.apply`` and at the job's own learning rate, and are judged every 100 steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import autotune
from autotune.measure.checks.distill import build_teacher, distilled
from autotune.measure.checks.quality import measure_quality
from autotune.measure.measurement import QualityOptions
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.models.pruning import Pruning
from autotune.training.training import Training

from .quality.jobs import JOBS, Job
from .rows import save_rows

_EVERY = 100
"""Steps between two evaluations."""


def main() -> None:
    """Run a part, keep its rows, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("teacher", "job"), required=True)
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--ratio", type=float, action="append", help="default: 0.5 and 0.75; of a job, 0.5")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000, help="that a job trains on")
    parser.add_argument("--plan", type=Path, help="of a search of that job")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "autotune-quality")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.job or JOBS:
        job = Job(name, arguments.cache)
        if arguments.part == "job":
            ratio = (arguments.ratio or [0.5])[0]
            plan = Plan(settings=_cut(job, ratio)) if arguments.plan is None else autotune.load_plan(arguments.plan)
            row = trained_on(job, plan, arguments.steps)
            save_rows("recovery-job", "cpu", [row])
            print(curves(row), flush=True)
            continue
        for ratio in arguments.ratio or (0.5, 0.75):
            rows = [*with_teacher(job, ratio, arguments.seeds)]
            save_rows("recovery-teacher", "cpu", rows)
            print(told(rows), flush=True)


def with_teacher(job: Job, ratio: float, num_seeds: int) -> Iterator[dict[str, Any]]:
    """A row for each seed."""
    task, settings = _task(job), _cut(job, ratio)
    assert task.batch_size is not None, "each job states it"
    for seed in range(1, num_seeds + 1):
        scores, seconds = [], []
        for has_teacher in (False, True):
            training = _applied(Plan(settings=settings), task, seed)
            if has_teacher:
                training = distilled(training, task, build_teacher(task))
            began_s = time.process_time()
            measure_quality(training, task, QualityOptions(num_samples=job.recovery_steps * task.batch_size))
            seconds.append(round(time.process_time() - began_s, 2))
            parts = (job.parts["scores"](training.model, job.parts[part]) for part in ("JUDGED", "HELD_OUT"))
            scores.append(torch.cat([*parts]).double())
        gained = scores[1] - scores[0]
        yield {
            "job": job.name,
            "version": job.version,
            "ratio": ratio,
            "seed": seed,
            "num_steps": job.recovery_steps,
            "num_examples": len(gained),
            "alone": round(scores[0].mean().item(), 6),
            "taught": round(scores[1].mean().item(), 6),
            "gained": round(gained.mean().item(), 6),
            "error": round((gained.std() / len(gained) ** 0.5).item(), 6),
            "seconds": {"alone": seconds[0], "taught": seconds[1]},
        }


def trained_on(job: Job, plan: Plan, num_steps: int) -> dict[str, Any]:
    """A row: quality every so many steps, of the job with the plan and of the job as it stands."""
    task = _task(job)
    sides = {"plan": plan, "whole": Plan(settings=Settings())}
    found = {name: _curve(job, _applied(one, task, seed=1), num_steps) for name, one in sides.items()}
    return {
        "job": job.name,
        "version": job.version,
        "settings": plan.settings.written(),
        "has_recovered": plan.weights is not None,
        "num_steps": [*range(0, num_steps + 1, _EVERY)],
        "quality": {name: values for name, (values, _) in found.items()},
        "seconds": {name: round(seconds, 1) for name, (_, seconds) in found.items()},
    }


def _curve(job: Job, training: Training, num_steps: int) -> tuple[list[float], float]:
    """The quality before the first step and after every so many, and the processor seconds of the steps."""
    values, seconds, taken = [_judged(job, training)], 0.0, 0
    while taken < num_steps:
        began_s = time.process_time()
        for batch in training.loader:
            taken += training.step(batch).stepped
            if taken % _EVERY == 0:
                seconds += time.process_time() - began_s
                values.append(_judged(job, training))
                began_s = time.process_time()
            if taken == num_steps:
                break
        else:
            seconds += time.process_time() - began_s
    return values, seconds


def _judged(job: Job, training: Training) -> float:
    """As the job judges between two steps."""
    modes = [(one, one.training) for one in training.model.modules()]
    found = job.scores(training.model).mean().item()
    for one, was_training in modes:
        one.training = was_training
    return round(found, 6)


def _task(job: Job) -> autotune.Task:
    return dataclasses.replace(autotune.load_task(str(job.path)), weights=str(job.weights))


def _cut(job: Job, ratio: float) -> Settings:
    """Those that cut so much of each width, with the record of what stays: the same from each seed."""
    settings = Settings(pruning=Pruning(kind="structured", ratio=ratio))
    return _applied(Plan(settings=settings), _task(job), seed=0).settings


def _applied(plan: Plan, task: autotune.Task, seed: int) -> Training:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what of a model stays whole, once more from each seed
        return autotune.apply(plan, task, seed=seed)


def told(rows: list[dict[str, Any]]) -> str:
    """Rows of one cut in words; gains are in points of a hundred."""
    gained = [row["gained"] for row in rows]
    over_seeds = statistics.stdev(gained) / len(gained) ** 0.5 if len(gained) > 1 else 0.0
    error = max(over_seeds, statistics.fmean(row["error"] for row in rows) / len(rows) ** 0.5)
    mean = statistics.fmean(gained)
    alone, taught = (statistics.fmean(row[name] for row in rows) for name in ("alone", "taught"))
    times = statistics.fmean(row["seconds"]["taught"] / row["seconds"]["alone"] for row in rows)
    verdict = "gains" if mean > 2 * error else "loses" if mean < -2 * error else "gains nothing beyond noise"
    by_seed = " ".join(f"{100 * one:+.2f}" for one in gained)
    return (
        f"{rows[0]['job']}, {rows[0]['ratio']:.0%} cut, {rows[0]['num_steps']} steps: {alone:.4f} alone, {taught:.4f} "
        f"with a teacher; {by_seed} points by seed (error of the mean {100 * error:.2f}): {verdict}; {times:.1f} times "
        "the time"
    )


def curves(row: dict[str, Any]) -> str:
    """A row of a job in words."""
    times = row["seconds"]["whole"] / row["seconds"]["plan"]
    lines = [f"{row['job']}, {row['settings']}: {times:.2f} times as fast over {row['num_steps'][-1]} steps"]
    lines += ["  steps    plan    as it stands"]
    both = zip(row["num_steps"], row["quality"]["plan"], row["quality"]["whole"], strict=True)
    return "\n".join([*lines, *(f"  {steps:5} {plan:8.4f} {whole:8.4f}" for steps, plan, whole in both)])


if __name__ == "__main__":
    main()
