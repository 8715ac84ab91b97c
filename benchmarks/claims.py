"""Whether jobs go as fast as their plans say: ten plans, each from a search of its own, beside plain jobs.

For each example and each of five budgets: a search as a user runs it, and then `autotune run plan.yaml -- python
plain_job.py`, which times 200 optimizer steps of its own, several times. Given is the jobs' median speed over the speed
that the plan states. Bar: within 3 % at the median over the plans.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

from autotune.commands.where import Where
from autotune.search.driver import search
from autotune.search.options import SearchOptions
from autotune.units import format_percent

from .honesty import run_job
from .rows import EXAMPLES, save_rows

BAR = 0.03
SHARES = (None, 1.0, 0.95, 0.9, 0.85)
"""Budgets, as shares of what the job takes as it stands; None is no limit."""


def main() -> None:
    """Search, run jobs, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=("char_gpt", "digits_cnn"), action="append", help="default: both")
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=3, help="for each plan")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each job")
    arguments = parser.parse_args()
    rows = []
    for example in arguments.example or ("char_gpt", "digits_cnn"):
        for share in SHARES:
            rows.append(compare(example, share, arguments))
            print(line(rows[-1]), flush=True)
            save_rows("claims", "cpu", rows[-1:])
    off = [abs(row["job_over_claim"] - 1) for row in rows]
    median = statistics.median(off)
    verdict = "within" if median <= BAR else "OVER"
    print(
        f"{len(rows)} plans: off by {median:.1%} at the median, {max(off):.1%} at most; {verdict} the bar of {BAR:.0%}"
    )


def compare(example: str, share: float | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """One plan, and the jobs that apply it."""
    task = str(EXAMPLES / example / "model.py")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        options = SearchOptions(task, budget_share=share, trials=arguments.trials, trial_time_s=2.0)
        with Where(arguments.executor).open(task, "cpu") as executor:
            plan = search(options, executor, lambda event: None, threading.Event())
        jobs = [run_job(task, Path("plan.yaml"), arguments.steps)["samples_per_s"] for _ in range(arguments.jobs)]
    assert plan.measured is not None, "a search measures its plan"
    assert plan.search is not None
    stated = plan.measured.samples_per_s
    return {
        "example": example,
        "budget": share,
        "settings": plan.settings.model_dump(mode="json", exclude_defaults=True),
        "stated": stated.model_dump(mode="json"),
        "jobs": [round(job, 2) for job in jobs],
        "job_over_claim": round(statistics.median(jobs) / stated.value, 4),
        "gain": plan.gain.model_dump(mode="json", exclude_none=True) if plan.gain else None,
        "seconds": plan.search.seconds,
        "notes": list(plan.notes),
    }


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    budget = "no limit" if row["budget"] is None else format_percent(row["budget"])
    stated = row["stated"]
    return (
        f"{row['example']}, {budget}: the plan states {stated['value']:.1f} samples/s ({stated['low']:.1f} to "
        f"{stated['high']:.1f}; {stated['repeats']} runs), jobs do {', '.join(f'{job:.1f}' for job in row['jobs'])}: "
        f"{row['job_over_claim']:.3f} of it; a search of {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
