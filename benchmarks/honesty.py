"""Whether a plan's figures are what a plain training script gets that applies it.

For each example: search, then in turn, round by round, a trial in a fresh interpreter as `autotune verify` runs it, and
`autotune run plan.yaml -- python plain_job.py`, which times 200 optimizer steps of its own and reads its own peak.
Bars: speed within 5 %, peak within 3 % under tcmalloc, at the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from autotune.commands import Where
from autotune.plan import Plan, load_plan
from autotune.search.driver import search
from autotune.search.inquiry import Inquiry, inspect
from autotune.search.options import SearchOptions
from autotune.search.pace import Pace
from autotune.workers import Executor, Measured

from .rows import EXAMPLES, HERE, save_rows

SPEED_BAR = 0.05
PEAK_BAR = 0.03
BUDGETS = {"char_gpt": 560 * 2**20, "digits_cnn": 560 * 2**20}


def main() -> None:
    """Measure both ways and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--example", choices=tuple(BUDGETS), action="append", help="default: both")
    parser.add_argument("--plan", type=Path, help="use this plan instead of searching")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    arguments = parser.parse_args()
    rows = []
    for example in arguments.example or BUDGETS:
        path = arguments.plan or find_plan(example, arguments.device)
        found = [
            {"example": example, "round": number, **row}
            for number, row in enumerate(compare(example, path, arguments.rounds, arguments.steps), 1)
        ]
        report(example, found, load_plan(path))
        rows += found
    print(save_rows("honesty", arguments.device, rows))


def find_plan(example: str, device: Any) -> Path:
    """Search for an example's plan, briefly; it stays beside the results of other runs, out of git."""
    path = HERE / ".plans" / f"{example}-{device}.yaml"
    options = SearchOptions(
        task=str(EXAMPLES / example / "model.py"),
        budget_bytes=BUDGETS[example] if device == "cpu" else None,
        output=path,
        device=device,
        trials=12,
        trial_time_s=2.0,
        storage=f"sqlite:///{path.parent}/studies.db",
    )
    path.parent.mkdir(exist_ok=True)
    with Where("local").open(options.task, device) as executor:
        search(options, executor, lambda event: None, threading.Event())
    return path


def compare(example: str, path: Path, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """One row for each round: speed and peak as a trial measures them, and as a plain job does."""
    task, plan = str(EXAMPLES / example / "model.py"), load_plan(path)
    rows = []
    with Where("local").open(task, plan.budget.device) as executor:
        for _ in range(rounds):
            job = run_job(task, path, num_steps)
            rows.append({**run_trial(executor, task, plan, num_steps, job["samples_per_s"]), "job": job})
    return rows


def run_trial(executor: Executor, task: str, plan: Plan, num_steps: int, samples_per_s: float) -> dict[str, Any]:
    """The plan in a fresh interpreter, timed for as long as ``num_steps`` take a job of this speed."""
    seed = plan.search.seed if plan.search else 0
    facts = inspect(SearchOptions(task, device=plan.budget.device, allow_split=True), executor, Pace(1.0, None))
    inquiry = Inquiry(task, seed, plan.budget, facts)
    share_s = num_steps * facts.effective_batch / samples_per_s
    measure = inquiry.measure_options(plan.settings, share_s, None).model_copy(update={"precision": 1e-9})
    request = inquiry.request("honesty", plan.settings, measure, 600 + 4 * share_s)
    outcome = executor.submit(request.model_copy(update={"fresh": True})).result()
    if not isinstance(outcome, Measured):
        sys.exit(f"the plan could not be measured: {outcome}")
    found = outcome.measurement
    return {
        "settings": plan.settings.model_dump(mode="json", exclude_defaults=True),
        "trial": {"samples_per_s": found.samples_per_s.value, "peak_bytes": found.peak.process},
        "num_steps": found.num_steps,
    }


def run_job(task: str, path: Path, num_steps: int) -> dict[str, float]:
    """The plain script, started as a job is started."""
    job = [sys.executable, str(HERE / "plain_job.py"), task, str(num_steps)]
    command = [sys.executable, "-m", "autotune", "run", str(path), "--", *job]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def report(example: str, rows: list[dict[str, Any]], plan: Plan) -> None:
    """Print each figure's ratio, trial over job: the median and the range over the rounds."""
    for name, bar in (("samples_per_s", SPEED_BAR), ("peak_bytes", PEAK_BAR)):
        ratios = [row["trial"][name] / row["job"][name] for row in rows]
        median = statistics.median(ratios)
        verdict = "within" if abs(median - 1) <= bar else "OVER"
        print(
            f"{example}: {name}, trial over plain job: {median:.3f} (from {min(ratios):.3f} to {max(ratios):.3f} over "
            f"{len(ratios)} rounds), {verdict} the bar of {bar:.0%}; allocator {plan.settings.allocator.kind}"
        )


if __name__ == "__main__":
    main()
