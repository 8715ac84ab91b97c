"""How long a whole search takes to the same plan: this package's sampler beside Optuna's TPE.

For each example: a search with `--sampler gain`, from nothing to its plan; then one with `--sampler tpe`, which goes on
until it has taken several times as long. Both plans, and everything that TPE held for the fastest on the way, are then
measured in turn, round by round. TPE has the same plan once what it holds is as fast as the other's, within 2 %; as
much time is added as the other's finalists took. Bar: three times as long.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from autotune.commands.where import Where
from autotune.plan import Budget, Plan
from autotune.searches.driver import search
from autotune.searches.events import Event, PredictionEnded, Stopped, TrialEnded
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, inspect
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Settings
from autotune.workers import Measured

from .rows import EXAMPLES, save_rows

BAR = 3.0
SAME = 0.98
"""Share of the other's speed at which a plan counts as the same."""
_TIMES_AS_LONG = 3.5
"""TPE's search is ended after so many times the other's duration."""
_DEADLINE_S = 300.0


@dataclass
class Watched:
    """A search, and when it held what for the fastest."""

    began_s: float = field(default_factory=monotonic)
    num_trials: int = 0
    held: list[tuple[float, Settings]] = field(default_factory=list)
    """Seconds, and the fastest from then on that fits."""
    predicted_s: float = 0.0
    """Until the memory models had been asked, where they were."""
    explored_s: float = 0.0
    """Until the last trial, finalists not included."""
    total_s: float = 0.0
    stopped: str = ""
    plan: Plan | None = None


def main() -> None:
    """Search both ways and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=("char_gpt", "digits_cnn"), action="append", help="default: both")
    parser.add_argument("--budget", type=int, default=560, help="MiB")
    parser.add_argument("--trial-time", type=float, default=2.0, help="seconds of timed windows")
    parser.add_argument("--seed", type=int, action="append", help="may be given again; default: 0")
    parser.add_argument("--rounds", type=int, default=5, help="of measuring what was found, in turn")
    arguments = parser.parse_args()
    for example in arguments.example or ("char_gpt", "digits_cnn"):
        for seed in arguments.seed or (0,):
            row = compare(str(EXAMPLES / example / "model.py"), arguments, seed)
            print(line(row), flush=True)
            print(save_rows("search-time", "cpu", [row]), flush=True)


def compare(task: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One row."""
    ours = run(task, arguments, seed, "gain", None)
    tpe = run(task, arguments, seed, "tpe", _TIMES_AS_LONG * ours.total_s)
    assert ours.plan is not None
    plan = ours.plan.settings
    speeds = measure(task, list(dict.fromkeys([plan, *(held for _, held in (*ours.held, *tpe.held))])), arguments)
    if not speeds[plan]:
        raise SystemExit(
            f"{task}, seed {seed}: the plan {plan.canonical()} does not hold the budget when measured again"
        )
    ours_s, tpe_s = (_reached_s(watched, speeds, SAME * speeds[plan]) for watched in (ours, tpe))
    return {
        "task": Path(task).parent.name,
        "seed": seed,
        "budget_mib": arguments.budget,
        "ours": {
            "seconds": round(ours.total_s, 1),
            "predicted_after": round(ours.predicted_s, 1),
            "explored_after": round(ours.explored_s, 1),
            "trials": ours.num_trials,
            "stopped": ours.stopped,
            "held_after": ours_s and round(ours_s, 1),
            "held": _held(ours, speeds, speeds[plan]),
        },
        "tpe": {
            "seconds": round(tpe.total_s, 1),
            "trials": tpe.num_trials,
            "same_after": tpe_s and round(tpe_s + ours.total_s - ours.explored_s, 1),
            "held": _held(tpe, speeds, speeds[plan]),
        },
        "plan": plan.model_dump(mode="json", exclude_defaults=True),
        "plan_samples_per_s": round(speeds[plan], 1),
    }


def _reached_s(watched: Watched, speeds: dict[Settings, float], wanted: float) -> float | None:
    """When it first held what is as fast as that."""
    return next((at_s for at_s, held in watched.held if speeds[held] >= wanted), None)


def _held(watched: Watched, speeds: dict[Settings, float], unit: float) -> list[dict[str, Any]]:
    return [
        {
            "after": round(at_s, 1),
            "speed": round(speeds[held] / unit, 3),
            "settings": held.model_dump(mode="json", exclude_defaults=True),
        }
        for at_s, held in watched.held
    ]


def run(task: str, arguments: argparse.Namespace, seed: int, sampler: Any, most_s: float | None) -> Watched:
    """One search, from nothing; with ``most_s``, no trial is begun after so many seconds."""
    watched, stop = Watched(), threading.Event()

    def observe(event: Event) -> None:
        elapsed_s = monotonic() - watched.began_s
        if isinstance(event, TrialEnded):
            watched.num_trials += 1
            if event.is_best:
                watched.held.append((elapsed_s, event.settings))
            if most_s is not None and elapsed_s > most_s:
                stop.set()
        if isinstance(event, PredictionEnded):
            watched.predicted_s = elapsed_s
        if isinstance(event, Stopped):
            watched.explored_s, watched.stopped = elapsed_s, event.reason

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),  # where no memory model is kept
        Where("local").open(task, "cpu") as executor,
    ):
        options = SearchOptions(
            task=task,
            budget=arguments.budget * 2**20,
            output=Path(folder) / "plan.yaml",
            trials=24 if most_s is None else 1000,
            trial_time=arguments.trial_time,
            sampler=sampler,
            seed=seed,
            storage=f"sqlite:///{folder}/study.db",
        )
        watched.plan = search(options, executor, observe, stop)
    watched.total_s = monotonic() - watched.began_s
    return watched


def measure(task: str, every: list[Settings], arguments: argparse.Namespace) -> dict[Settings, float]:
    """Samples per second of each, the median over the rounds; 0 where a round's peak is over the budget."""
    found: dict[Settings, list[float]] = {settings: [] for settings in every}
    budget = Budget(limit=arguments.budget * 2**20, device="cpu")
    with Where("local").open(task, "cpu") as executor:
        requests = Requests(task, 0, budget, inspect(SearchOptions(task=task), executor, TimeBudget(1.0, None)))
        for _ in range(arguments.rounds):
            for settings, speeds in found.items():
                options = requests.measure_options(settings, arguments.trial_time, None, enforce=False)
                outcome = executor.submit(requests.request("again", settings, options, _DEADLINE_S)).result()
                fits = isinstance(outcome, Measured) and budget.holds(outcome.measurement.peak.process)
                speeds.append(outcome.measurement.samples_per_s.value if fits else 0.0)
    return {settings: statistics.median(speeds) for settings, speeds in found.items()}


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    ours, tpe = row["ours"], row["tpe"]
    same_s = tpe["same_after"]
    ratio = f"{same_s / ours['seconds']:.1f} times as long" if same_s else f"not within {_TIMES_AS_LONG:.0f} times that"
    return (
        f"{row['task']}, seed {row['seed']}: ours {ours['seconds']:.0f} s, of which "
        f"{ours['predicted_after']:.0f} until memory models were known, {ours['trials']} trials ({ours['stopped']}), "
        f"the plan held for the fastest after {ours['held_after'] or '-'} s; "
        f"tpe has the same plan after {same_s or '-'} s: {ratio} (bar: {BAR:.0f}); it held "
        + ", ".join(f"{held['speed']:.2f} after {held['after']:.0f} s" for held in tpe["held"])
    )


if __name__ == "__main__":
    main()
