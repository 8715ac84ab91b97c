"""Whether speeds and plans are true on a busy machine: under injected load, beside a quiet twin in the same run.

    python -m benchmarks.busy --part speed [--job NAME]... [--load 0.6]...  # 2 minutes for a job and a load, 40 for all
    python -m benchmarks.busy --part plan [--job NAME]... [--load 0.6]...   # 9 minutes for a job and a load, 2 hours

Load: for each processor a process that is busy for such a share of the time, in bursts of about a second. *speed*: the
job as it stands in fresh processes, quiet and loaded in turn; given is what the loaded one states over the mean of its
two quiet neighbours. Bars: off by 5 % at the median and 15 % at most; a speed whose interval is wider than 15 %, or of
whose time other work took 20 %, is called unsure, and counted apart. *plan*: a search in quiet and one under load; both
plans then in turn, in quiet. Bar: 0.97 of the quiet plan's speed, or a plan whose gain is not proven. What is quiet
must be: a turn beside one that other work took more than 5 % of is dropped, and counted. Rows are added to
results/busy-cpu.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.commands.where import Where
from autotune.errors import AutotuneError
from autotune.measure import Measurement
from autotune.plan import Budget, Plan
from autotune.searches.driver import search
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, inspect, reference_settings
from autotune.searches.time_budget import TimeBudget
from autotune.searches.verdict import SPOILED
from autotune.techniques import Settings
from autotune.techniques.support.facts import num_processors
from autotune.workers import Executor, Measured

from .rows import EXAMPLES, HERE, save_rows

MEDIAN_BAR, WORST_BAR, PLAN_BAR = 0.05, 0.15, 0.97
UNSURE = 0.15
"""Half of an interval's width, as a share of its speed, above which a speed is called unsure."""
QUIET = 0.05
"""Largest share of a quiet turn that other work may have taken."""
LOADS = (0.0, 0.3, 0.6, 0.8)
JOBS = {
    "digits_cnn": EXAMPLES / "digits_cnn" / "model.py",
    "char_gpt": EXAMPLES / "char_gpt" / "model.py",
    "mlp": HERE / "busy_jobs" / "mlp.py",
    "text_cnn": HERE / "busy_jobs" / "text_cnn.py",
    "script": HERE / "busy_jobs" / "script.py",
}
SCRIPT_FLAGS = ("--batch-size", "{batch.micro=32}", "--grad-accum", "{batch.accumulate=1}")
_DEADLINE_S = 120.0
_MOST_S = 900.0
"""After which a load ends in any case."""


def main() -> None:
    """Measure the parts that are asked for, keep their rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("speed", "plan"), required=True)
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--load", type=float, choices=LOADS, action="append", help="default: all (plan: all but 0)")
    parser.add_argument("--rounds", type=int, default=4, help="loaded turns of a speed; turns of the two plans")
    parser.add_argument("--trial-time", type=float, default=2.0, help="timed seconds of each run")
    parser.add_argument("--trials", type=int, default=6, help="of each search")
    parser.add_argument("--max-time", type=float, default=180.0, help="seconds of each search")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.job or JOBS:
        for load in arguments.load or (LOADS if arguments.part == "speed" else LOADS[1:]):
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                row = (speed if arguments.part == "speed" else plan)(Job(name), load, arguments)
            rows.append(row)
            print(told(row), flush=True)
            save_rows("busy", "cpu", [row])
    print(verdict(rows))


@dataclass(frozen=True)
class Job:
    """What is trained."""

    name: str

    def options(self, **others: Any) -> SearchOptions:
        """Of a search."""
        path = str(JOBS[self.name])
        command = (sys.executable, path, *SCRIPT_FLAGS) if self.name == "script" else None
        return SearchOptions(task=path, command=command, device="cpu", **others)

    def executor(self) -> Executor:
        """One that is the caller's to close."""
        return Where("local", is_script=self.name == "script").open(str(JOBS[self.name]), "cpu")


@contextlib.contextmanager
def loaded(share: float) -> Iterator[list[int]]:
    """Other work on each processor; gives its pids."""
    command = [sys.executable, str(HERE / "busy_jobs" / "burner.py"), str(share), str(_MOST_S)]
    burners = [subprocess.Popen([*command, str(seed)]) for seed in range(num_processors())] if share else []
    try:
        yield [burner.pid for burner in burners]
    finally:
        for burner in burners:
            burner.terminate()
            burner.wait()


def speed(job: Job, load: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row: quiet and loaded runs of the job as it stands, in turn."""
    with job.executor() as executor:
        runs = Runs(job, executor)
        quiet, burdened = [runs.measure(runs.reference, arguments.trial_time)], []
        for _ in range(arguments.rounds):
            with loaded(load):
                burdened.append(runs.measure(runs.reference, arguments.trial_time))
            quiet.append(runs.measure(runs.reference, arguments.trial_time))
    return {
        "part": "speed",
        "job": job.name,
        "load": load,
        "quiet": [figures(one) for one in quiet],
        "loaded": [figures(one) for one in burdened],
    }


def plan(job: Job, load: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row: the plan of a quiet search and of one under load, and both in turn."""
    with job.executor() as executor:
        found = {"quiet": searched(job, executor, arguments, "quiet")}
        with loaded(load):
            found["loaded"] = searched(job, executor, arguments, "loaded")
        runs = Runs(job, executor)
        plans = {name: one for name, one in found.items() if one is not None}
        turns = [
            {name: figures(runs.measure(one.settings, arguments.trial_time)) for name, one in plans.items()}
            for _ in range(arguments.rounds)
        ]
    ratios = [
        round(turn["loaded"]["samples_per_s"] / turn["quiet"]["samples_per_s"], 4)
        for turn in turns
        if len(turn) == len(found) and max(one["disturbed"] for one in turn.values()) <= QUIET
    ]
    gain = plans["loaded"].gain if "loaded" in plans else None
    return {
        "part": "plan",
        "job": job.name,
        "load": load,
        "ratios": ratios,
        "num_dropped": len(turns) - len(ratios),
        "is_proven": gain is not None and gain.unproven is None,
        "settings": {name: one.settings.model_dump(mode="json", exclude_defaults=True) for name, one in plans.items()},
        "gain": {name: one.gain.model_dump(mode="json") if one.gain else None for name, one in plans.items()},
        "turns": turns,
    }


def searched(job: Job, executor: Executor, arguments: argparse.Namespace, name: str) -> Plan | None:
    """What a search comes to; None where it finds nothing."""
    options = job.options(
        output=Path(f"{name}.yaml"),
        trials=arguments.trials,
        trial_time=arguments.trial_time,
        max_time=arguments.max_time,
        storage=f"sqlite:///{Path.cwd()}/{name}.db",
    )
    try:
        return search(options, executor, lambda event: None, threading.Event())
    except AutotuneError as error:
        print(f"no plan, {name}: {error}", flush=True)
        return None


class Runs:
    """Runs a job's configurations in fresh processes."""

    def __init__(self, job: Job, executor: Executor) -> None:
        options = job.options()
        facts = inspect(options, executor, TimeBudget(_DEADLINE_S, None))
        self.reference = reference_settings(facts)
        self._executor = executor
        self._requests = Requests(options.task, 0, Budget(device="cpu"), facts, options.command)

    def measure(self, settings: Settings, share_s: float) -> Measurement:
        """A configuration, without a comparison of losses.

        Raises:
            RuntimeError: it failed.
        """
        measure = self._requests.measure_options(settings, share_s, None, enforce=False)
        request = self._requests.request(
            "busy", settings, measure.model_copy(update={"parity_batch": None}), _DEADLINE_S + 10 * share_s
        )
        outcome = self._executor.ask(request.model_copy(update={"fresh": True}))
        if not isinstance(outcome, Measured):
            raise RuntimeError(f"it could not be measured: {outcome}")
        return outcome.measurement


def half_width(one: Measurement) -> float:
    """Of a speed's interval, as a share of it."""
    return (one.samples_per_s.high - one.samples_per_s.low) / 2 / one.samples_per_s.value


def figures(one: Measurement) -> dict[str, float]:
    """What is kept of a run."""
    return {
        "samples_per_s": round(one.samples_per_s.value, 2),
        "half_width": round(half_width(one), 4),
        "disturbed": round(one.disturbed, 4),
        "calm": round(one.calm, 4),
    }


def told(row: dict[str, Any]) -> str:
    """A row in words."""
    what = f"{row['job']}, load {row['load']:.0%}"
    if row["part"] == "plan":
        ratios = ", ".join(f"{ratio:.3f}" for ratio in row["ratios"]) or "nothing"
        said = "proven" if row["is_proven"] else "not proven"
        return f"{what}: the plan over the quiet one's: {ratios} ({row['num_dropped']} turns dropped), {said}"
    sure, unsure, dropped = counted([row])
    ratios = ", ".join(f"{ratio:.3f}" for ratio in sure) or "nothing"
    return f"{what}: stated over quiet: {ratios}; {unsure} unsure, {dropped} turns dropped"


def counted(rows: Sequence[dict[str, Any]]) -> tuple[list[float], int, int]:
    """Of speeds: those that count, over the mean of their quiet neighbours; how many are unsure; how many dropped."""
    turns = [turn for row in rows for turn in zip(row["quiet"], row["loaded"], row["quiet"][1:], strict=False)]
    kept = [turn for turn in turns if max(turn[0]["disturbed"], turn[2]["disturbed"]) <= QUIET]
    sure = [
        2 * one["samples_per_s"] / (before["samples_per_s"] + after["samples_per_s"])
        for before, one, after in kept
        if one["half_width"] <= UNSURE and one["disturbed"] < SPOILED
    ]
    return sure, len(kept) - len(sure), len(turns) - len(kept)


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """All rows of a part against its bars."""
    if rows[0]["part"] == "plan":
        medians = [statistics.median(row["ratios"]) for row in rows if row["ratios"] and row["is_proven"]]
        unproven = sum(not row["is_proven"] for row in rows)
        nothing = sum(row["is_proven"] and not row["ratios"] for row in rows)
        said = "within" if all(median >= PLAN_BAR for median in medians) else "BELOW"
        told = f"{min(medians):.3f} at worst, {said} the bar of {PLAN_BAR}" if medians else "none of them counts"
        return f"{len(rows)} plans under load: {told}; {unproven} not proven, {nothing} without a calm turn"
    sure, unsure, dropped = counted(rows)
    rest = f"{unsure} unsure, {dropped} turns dropped"
    if not sure:
        return f"no speed counts: {rest}"
    off = [abs(ratio - 1) for ratio in sure]
    median, worst = statistics.median(off), max(off)
    said = "within" if median <= MEDIAN_BAR and worst <= WORST_BAR else "OVER"
    return (
        f"{len(sure)} speeds: off by {median:.1%} at the median, {worst:.1%} at most; {said} the bars of "
        f"{MEDIAN_BAR:.0%} and {WORST_BAR:.0%}; {rest}"
    )


if __name__ == "__main__":
    main()
