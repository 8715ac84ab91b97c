"""How long a default search takes beside the same search of an earlier state, and whether its plan is as fast.

    git worktree add FOLDER COMMIT
    python -m benchmarks.search_before FOLDER [--job NAME]... [--keep]  # 10 minutes a job

For each job: `autotune search` with its defaults and `--budget 100%`, by the package in FOLDER and by this one, each
once; then both plans in pairs of fresh processes that take turns. Bars: half the time, and a plan no slower than 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.commands.where import Where
from autotune.measure.timing.turns import trimmed_mean
from autotune.plan import Budget, Plan, load_plan
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, inspect
from autotune.searches.time_budget import TimeBudget

from .busy import JOBS, SCRIPT_FLAGS
from .pairs import compared, taking_turns
from .rows import HERE, save_rows

TIME_BAR, PLAN_BAR = 0.5, 0.99
_DEADLINE_S = 120.0
_TURN_S = 1.0


def main() -> None:
    """Search twice, compare, print, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of the earlier state")
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--pairs", type=int, default=3, help="of processes in which both plans take turns")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/search-before-cpu.jsonl")
    arguments = parser.parse_args()
    for name in arguments.job or JOBS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            row = compare(name, arguments.folder.resolve(), arguments.pairs)
        print(told(row), flush=True)
        if arguments.keep:
            save_rows("search-before", "cpu", [row])


def compare(name: str, earlier: Path, num_pairs: int) -> dict[str, Any]:
    """One job's row."""
    sides = {side: searched(name, side, checkout) for side, checkout in (("before", earlier), ("now", HERE.parent))}
    plans = {side: load_plan(f"{side}.yaml") for side in sides}
    for side, plan in plans.items():
        sides[side] |= {
            "settings": plan.settings.model_dump(mode="json", exclude_defaults=True),
            "trials": plan.search.trials if plan.search else None,
            "gain": plan.gain.model_dump(mode="json", exclude_none=True) if plan.gain else None,
        }
    return {"job": name, **sides, "now_over_before": speeds(name, plans, num_pairs)}


def searched(name: str, side: str, checkout: Path) -> dict[str, Any]:
    """A search from the command line, with the seconds that it took."""
    job = ["--", sys.executable, str(JOBS[name]), *SCRIPT_FLAGS] if name == "script" else [str(JOBS[name])]
    options = ["--budget", "100%", "--device", "cpu", "-o", f"{side}.yaml"]
    command = [sys.executable, "-m", "autotune", "search", *options, *job]
    began_s = time.monotonic()
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(checkout)}, check=True, stdout=sys.stderr)
    return {"seconds": round(time.monotonic() - began_s, 1)}


def speeds(name: str, plans: dict[str, Plan], num_pairs: int) -> list[float]:
    """This one's plan over the earlier one's, a ratio for each pair of processes; none where they are the same."""
    if plans["before"].settings == plans["now"].settings or name == "script":
        return []
    path = str(JOBS[name])
    with Where("local").open(path, "cpu") as executor:
        facts = inspect(SearchOptions(task=path, device="cpu"), executor, TimeBudget(_DEADLINE_S, None))
        requests = Requests(path, 0, Budget(device="cpu"), facts)
        asked = taking_turns(requests, plans["now"].settings, plans["before"].settings, _TURN_S)
        found = [compared(executor, asked) for _ in range(num_pairs)]
    return [round(math.exp(trimmed_mean([turn.log_ratio for turn in one.turns])[0]), 4) for one in found]


def told(row: dict[str, Any]) -> str:
    """A row in words."""
    before_s, now_s = (row[side]["seconds"] for side in ("before", "now"))
    share, ratios = now_s / before_s, row["now_over_before"]
    plan = f"its plan {statistics.fmean(ratios):.3f} times as fast" if ratios else "the same plan"
    slow = "within" if share <= TIME_BAR else "OVER"
    worse = "; SLOWER than the bar" if ratios and statistics.fmean(ratios) < PLAN_BAR else ""
    return f"{row['job']}: {now_s:.0f} s for {before_s:.0f} s, {share:.2f} of it ({slow} {TIME_BAR}); {plan}{worse}"


if __name__ == "__main__":
    main()
