"""What techniques that change the model's function buy, and what of its quality they cost, on jobs trained first.

    python -m benchmarks.quality [--job digits]

For each job: the job as it stands is trained to its quality, and its weights are kept. Then two searches go on from
those, under one tight budget: one with exact and rounding techniques alone, one with all (``--max-quality-drop``). Each
plan is then applied from other seeds, trained as its recovery was, and judged on data that neither the training nor the
search has seen. Bar: at least 1.4 times the speed of the best exact plan, or 30 % less memory, and no more quality lost
than was allowed. A job takes 8 to 9 minutes on two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import autotune
from autotune.commands.where import Where
from autotune.measure.checks.quality import measure_quality
from autotune.measure.measurement import QualityOptions
from autotune.plan import Plan
from autotune.searches.driver import search
from autotune.searches.events import Event, TrialEnded
from autotune.searches.options import Drop, SearchOptions
from autotune.techniques import Settings
from autotune.units import format_percent

from .rows import HERE, save_rows

JOBS = ("digits", "char_gpt", "vit")


def main() -> None:
    """Train, search twice, judge; print and keep a row for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--budget", type=float, default=0.9, help="share of what the job takes as it stands")
    parser.add_argument("--drop", type=float, default=0.01, help="share of the quality that may be lost")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--max-time", type=float, default=130.0, help="seconds of the exact search; twice for all")
    parser.add_argument("--trial-time", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3, help="from which the plans are judged at the end")
    arguments = parser.parse_args()
    for job in arguments.job or JOBS:
        row = compare(job, arguments)
        print(line(row), flush=True)
        save_rows("quality", "cpu", [row])


def compare(job: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One job's row."""
    path = HERE / "quality_jobs" / f"{job}.py"
    os.environ.pop("QUALITY_WEIGHTS", None)
    task = autotune.load_task(str(path))
    module = sys.modules[path.stem]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        trained = _trained(task, Settings(), module.train_steps, seed=0)
        torch.save(trained.state_dict(), "weights.pt")
        os.environ["QUALITY_WEIGHTS"] = str(Path("weights.pt").resolve())
        task = autotune.Task(**{**vars(task), "weights": os.environ["QUALITY_WEIGHTS"]})
        found = {}
        for name, drop in (("exact", None), ("all", Drop(arguments.drop, is_share=True))):
            options = SearchOptions(
                task=str(path),
                budget=format_percent(arguments.budget),
                trials=arguments.trials,
                trial_time=arguments.trial_time,
                max_time=arguments.max_time * (1 if drop is None else 2),
                max_quality_drop=drop,
                recovery_steps=module.recovery_steps,
                output=Path(f"{name}.yaml"),
            )
            found[name] = _search(options)
            plan = found[name]["plan"]
            found[name]["held_out"] = [
                round(module.held_out(_trained(task, plan.settings, module.recovery_steps, seed)), 5)
                for seed in range(1, arguments.seeds + 1)
            ]
    return _row(job, arguments, found)


def _trained(task: autotune.Task, settings: Settings, num_steps: int, seed: int) -> Any:
    """A model after so many optimizer steps of the reference's batch, trained as in a search's recovery."""
    assert task.batch_size is not None, "each job states it"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = autotune.apply(Plan(settings=settings), task, seed=seed)
    measure_quality(training, task, QualityOptions(num_samples=num_steps * task.batch_size))
    return training.model


def _search(options: SearchOptions) -> dict[str, Any]:
    trials: list[dict[str, Any]] = []

    def observe(event: Event) -> None:
        if isinstance(event, TrialEnded):
            quality = getattr(getattr(event.outcome, "measurement", None), "quality", None)
            trials.append(
                {
                    "settings": event.settings.model_dump(mode="json", exclude_defaults=True),
                    "feasible": event.feasible,
                    "quality": quality and quality.value,
                }
            )

    began_s = time.monotonic()
    with Where("local").open(options.task, "cpu") as executor:
        plan = search(options, executor, observe, threading.Event())
    return {"plan": plan, "seconds": time.monotonic() - began_s, "trials": trials}


def _row(job: str, arguments: argparse.Namespace, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    exact, every = (found[name]["plan"].measured for name in ("exact", "all"))
    return {
        "job": job,
        "budget": arguments.budget,
        "drop": arguments.drop,
        "speed_over_exact": round(every.samples_per_s.value / exact.samples_per_s.value, 3),
        "memory_over_exact": round(every.peak.process / exact.peak.process, 3),
        "search_over_exact": round(found["all"]["seconds"] / found["exact"]["seconds"], 2),
        **{
            name: {
                "settings": one["plan"].settings.written(),
                "samples_per_s": one["plan"].measured.samples_per_s.model_dump(mode="json"),
                "peak": one["plan"].measured.peak.process,
                "quality": one["plan"].quality and one["plan"].quality.model_dump(mode="json"),
                "held_out": one["held_out"],
                "seconds": round(one["seconds"], 1),
                "trials": one["trials"],
                "notes": list(one["plan"].notes),
            }
            for name, one in found.items()
        },
    }


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    held_out = {name: statistics.fmean(row[name]["held_out"]) for name in ("exact", "all")}
    return (
        f"{row['job']}: {row['speed_over_exact']:.2f} times the exact plan's speed, {row['memory_over_exact']:.2f} of "
        f"its memory; held out {held_out['all']:.4g}, the exact plan's {held_out['exact']:.4g} (mean of "
        f"{len(row['all']['held_out'])} seeds); the search took {row['search_over_exact']:.1f} times as long; "
        f"{row['all']['settings']}"
    )


if __name__ == "__main__":
    main()
