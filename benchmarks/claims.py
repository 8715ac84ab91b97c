"""Whether jobs go as fast as their plans say: ten plans, each from a search of its own, beside plain jobs.

For each example and each of five budgets: a search as a user runs it; then 1,000 optimizer steps with the plan
(`autotune run plan.yaml -- python plain_job.py`) and as many of the same job without this package (jobs/plain_loop.py),
in five turns of 200. Given is the jobs' median speed over the speed that the plan states, and the median of the turns'
ratios over the gain that it states. Bars: within 3 % at the median over the plans; of the gain also 8 % at worst.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.commands.where import Where
from autotune.searches.driver import search
from autotune.searches.options import SearchOptions
from autotune.units import format_percent

from .honesty import printed, run_job
from .rows import EXAMPLES, HERE, save_rows

BAR, WORST_BAR = 0.03, 0.08
SHARES = (None, 1.0, 0.95, 0.9, 0.85)
"""Budgets, as shares of what the job takes as it stands; None is no limit."""


def main() -> None:
    """Search, run jobs, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=("char_gpt", "digits_cnn"), action="append", help="default: both")
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--share", type=float, choices=SHARES[1:], action="append", help="budget; default: all five")
    parser.add_argument("--turns", type=int, default=5, help="of the plan and of the plain loop")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each turn")
    arguments = parser.parse_args()
    rows = []
    for example in arguments.example or ("char_gpt", "digits_cnn"):
        for share in arguments.share or SHARES:
            rows.append(compare(example, share, arguments))
            print(line(rows[-1]), flush=True)
            save_rows("claims", "cpu", rows[-1:])
    told("speeds", [row["job_over_claim"] for row in rows], math.inf)
    told("gains", [row["gain_over_claim"] for row in rows if row["gain_over_claim"] is not None], WORST_BAR)


def told(what: str, ratios: Sequence[float], worst_bar: float) -> None:
    """Print how far off they are."""
    off = [abs(ratio - 1) for ratio in ratios]
    if not off:
        return
    median, worst = statistics.median(off), max(off)
    verdict = "within" if median <= BAR and worst <= worst_bar else "OVER"
    bars = f"{BAR:.0%}" if worst_bar == math.inf else f"{BAR:.0%} and {worst_bar:.0%}"
    print(f"{what} of {len(off)} plans: off by {median:.1%} at the median, {worst:.1%} at most; {verdict} {bars}")


def compare(example: str, share: float | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """One plan, and the jobs that apply it."""
    task = str(EXAMPLES / example / "model.py")
    loop = [sys.executable, str(HERE / "jobs" / "plain_loop.py"), task, str(arguments.steps)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        options = SearchOptions(
            task=task, budget=None if share is None else format_percent(share), trials=arguments.trials, trial_time=2.0
        )
        with Where(arguments.executor).open(task, "cpu") as executor:
            plan = search(options, executor, lambda event: None, threading.Event())
        jobs, loops = [], []
        for turn in range(arguments.turns):
            sides = [(jobs, lambda: run_job(task, Path("plan.yaml"), arguments.steps)), (loops, lambda: printed(loop))]
            for found, run in sides if turn % 2 == 0 else reversed(sides):
                found.append(run()["samples_per_s"])
    assert plan.measured is not None, "a search measures its plan"
    assert plan.search is not None
    stated, gain = plan.measured.samples_per_s, plan.gain.speed if plan.gain else None
    turns = [job / loop for job, loop in zip(jobs, loops, strict=True)]
    return {
        "example": example,
        "budget": share,
        "settings": plan.settings.model_dump(mode="json", exclude_defaults=True),
        "stated": stated.model_dump(mode="json"),
        "jobs": [round(job, 2) for job in jobs],
        "loops": [round(one, 2) for one in loops],
        "job_over_claim": round(statistics.median(jobs) / stated.value, 4),
        "gained": round(statistics.median(turns), 4),
        "gain_over_claim": round(statistics.median(turns) / gain, 4) if gain else None,
        "gain": plan.gain.model_dump(mode="json", exclude_none=True) if plan.gain else None,
        "seconds": plan.search.seconds,
        "notes": list(plan.notes),
    }


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    budget = "no limit" if row["budget"] is None else format_percent(row["budget"])
    stated, gain = row["stated"], row["gain"]
    of_gain = f"; in turn with the plain loop {row['gained']:.2f}x, stated {gain['speed']}" if gain else ""
    return (
        f"{row['example']}, {budget}: the plan states {stated['value']:.1f} samples/s ({stated['low']:.1f} to "
        f"{stated['high']:.1f}; {stated['repeats']} runs), jobs do {', '.join(f'{job:.1f}' for job in row['jobs'])}: "
        f"{row['job_over_claim']:.3f} of it{of_gain}; a search of {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
