"""Whether a plan's figures are what a plain training script gets that applies it, and the reference's what one gets
that knows nothing of plans.

For each example: search, then in turn, round by round, a trial in a fresh interpreter as `autotune verify` runs it, and
`autotune run plan.yaml -- python plain_job.py`, which times 200 optimizer steps of its own and reads its own peak.
Bars: speed within 5 %, peak within 3 % under tcmalloc, at the median over the rounds.

With `--reference`, for each of three tasks: the reference, as a search measures it beside its plan, and
`python jobs/plain_loop.py model.py`, which does not import this package. Bars: speed and peak within 5 %, on glibc too.
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

from autotune.commands.where import Where
from autotune.plan import Budget, Plan, load_plan
from autotune.searches.driver import search
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, inspect, reference_settings
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Settings
from autotune.workers import Executor, Measured

from .rows import EXAMPLES, HERE, save_rows

SPEED_BAR = 0.05
PEAK_BAR = 0.03
REFERENCE_PEAK_BAR = 0.05
REFERENCES = {
    "char_gpt": EXAMPLES / "char_gpt" / "model.py",
    "digits_cnn": EXAMPLES / "digits_cnn" / "model.py",
    "gpt2": HERE / "jobs" / "gpt2.py",
}
SEARCHED = ("char_gpt", "digits_cnn")
"""Within what each takes as it stands, which is not the same on all processors."""


def main() -> None:
    """Measure both ways and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--example", choices=tuple(REFERENCES), action="append", help="default: all")
    parser.add_argument("--plan", type=Path, help="use this plan instead of searching")
    parser.add_argument("--reference", action="store_true", help="the reference beside a loop without this package")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    arguments = parser.parse_args()
    if arguments.reference and arguments.device != "cpu":
        parser.error("--reference is for a CPU: the plain loop moves nothing to a device")
    if not arguments.reference and set(arguments.example or ()) - set(SEARCHED):
        parser.error(f"without --reference, the examples are {', '.join(SEARCHED)}")
    rows = []
    for example in arguments.example or (REFERENCES if arguments.reference else SEARCHED):
        if arguments.reference:
            compared = compare_reference(str(REFERENCES[example]), arguments.rounds, arguments.steps)
        else:
            path = arguments.plan or find_plan(example, arguments.device)
            compared = compare(example, path, arguments.rounds, arguments.steps)
        found = [{"example": example, "round": number, **row} for number, row in enumerate(compared, 1)]
        report(example, found)
        rows += found
    print(save_rows("honesty", arguments.device, rows))


def find_plan(example: str, device: Any) -> Path:
    """Search for an example's plan, briefly; it stays beside the results of other runs, out of git."""
    path = HERE / ".plans" / f"{example}-{device}.yaml"
    options = SearchOptions(
        task=str(EXAMPLES / example / "model.py"),
        budget="100%" if device == "cpu" else None,
        output=path,
        device=device,
        trials=12,
        trial_time=2.0,
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
            rows.append({**run_plan(executor, task, plan, num_steps, job["samples_per_s"]), "job": job})
    return rows


def compare_reference(task: str, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """One row for each round: speed and peak of the reference, and of a loop without this package. On a CPU."""
    options, rows = SearchOptions(task=task, device="cpu"), []
    with Where("local").open(task, "cpu") as executor:
        facts = inspect(options, executor, TimeBudget(1.0, None))
        requests = Requests(task, 0, Budget(device="cpu"), facts)
        for _ in range(rounds):
            loop = printed([sys.executable, str(HERE / "jobs" / "plain_loop.py"), task, str(num_steps)])
            share_s = num_steps * facts.effective_batch / loop["samples_per_s"]
            changes = {"plain_loop": True, "parity_batch": None, "enforce": False}
            row = run_trial(executor, requests, reference_settings(facts), share_s, changes)
            rows.append({**row, "kind": "reference", "loop": loop})
    return rows


def run_plan(executor: Executor, task: str, plan: Plan, num_steps: int, samples_per_s: float) -> dict[str, Any]:
    """The plan, timed for as long as ``num_steps`` take a job of this speed."""
    seed = plan.search.seed if plan.search else 0
    facts = inspect(
        SearchOptions(task=task, device=plan.budget.device, allow_split=True), executor, TimeBudget(1.0, None)
    )
    requests = Requests(task, seed, plan.budget, facts)
    return run_trial(executor, requests, plan.settings, num_steps * facts.effective_batch / samples_per_s, {})


def run_trial(
    executor: Executor, requests: Requests, settings: Settings, share_s: float, changes: dict[str, Any]
) -> dict[str, Any]:
    """A configuration in a fresh interpreter, its timed windows ``share_s`` long."""
    measure = requests.measure_options(settings, share_s, None).model_copy(update={"precision": 1e-9, **changes})
    request = requests.request("honesty", settings, measure, 600 + 4 * share_s)
    outcome = executor.submit(request.model_copy(update={"fresh": True})).result()
    if not isinstance(outcome, Measured):
        sys.exit(f"it could not be measured: {outcome}")
    found = outcome.measurement
    return {
        "settings": settings.model_dump(mode="json", exclude_defaults=True),
        "trial": {"samples_per_s": found.samples_per_s.value, "peak_bytes": found.peak.process},
        "num_steps": found.num_steps,
    }


def run_job(task: str, path: Path, num_steps: int) -> dict[str, float]:
    """The plain script, started as a job is started."""
    job = [sys.executable, str(HERE / "plain_job.py"), task, str(num_steps)]
    return printed([sys.executable, "-m", "autotune", "run", str(path), "--", *job])


def printed(command: list[str]) -> dict[str, float]:
    """The row that a script prints last."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def report(example: str, rows: list[dict[str, Any]]) -> None:
    """Print each figure's ratio, trial over job: the median and the range over the rounds."""
    is_reference = "loop" in rows[0]
    ours, other = ("reference", "plain loop") if is_reference else ("trial", "plain job")
    for name, bar in (("samples_per_s", SPEED_BAR), ("peak_bytes", REFERENCE_PEAK_BAR if is_reference else PEAK_BAR)):
        ratios = [row["trial"][name] / row["loop" if is_reference else "job"][name] for row in rows]
        median = statistics.median(ratios)
        verdict = "within" if abs(median - 1) <= bar else "OVER"
        print(
            f"{example}: {name}, {ours} over {other}: {median:.3f} (from {min(ratios):.3f} to {max(ratios):.3f} over "
            f"{len(ratios)} rounds), {verdict} the bar of {bar:.0%}; "
            f"allocator {rows[0]['settings'].get('allocator', {}).get('kind', 'system')}",
            flush=True,
        )


if __name__ == "__main__":
    main()
