"""A plan beside what a user would pick instead, at the same budget on the same job in one run.

For each job, at a loose budget (1.1 times what the job takes) and a tight one (what it takes with a batch of one, and a
quarter of what its own batch adds to that): the job as it is; the batch that transformers' `auto_find_batch_size` and
Lightning's `scale_batch_size` come to, which tune nothing else; by hand; `torch.compile` alone; the plan of a search.
Then all that fit, in turn, round by round, each in a fresh process, through the code that `autotune verify` measures
by.
Bars: the plan is at least 0.97 of the fastest other; 1.3 times as fast in the geometric mean under tight budgets.

The others change or split the batch, whatever that does to the gradient: so may the search (`--allow-split`).
It takes 23 minutes on a quiet machine of two processors.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.commands.where import Where
from autotune.errors import AutotuneError
from autotune.measure import Measurement
from autotune.plan import Budget
from autotune.searches.driver import search
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, inspect, reference_settings
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Facts, Settings
from autotune.techniques.batch import Batch
from autotune.techniques.compile import Compile
from autotune.workers import Executor, Measured

from .batch_rules import auto_find_sizes, first_that_fits, power_sizes
from .rows import EXAMPLES, HERE, save_rows

LOOSE = 1.1
TIGHT = 0.25
"""Share of what the job's own batch adds to a batch of one."""
NEVER_SLOWER, TIGHT_MEAN = 0.97, 1.3
FIT_S = 0.2
"""Timed seconds of a run that only tells whether a configuration fits."""


CASES = {
    "digits_cnn": EXAMPLES / "digits_cnn" / "model.py",
    "char_gpt": EXAMPLES / "char_gpt" / "model.py",
    "gpt2": HERE / "jobs" / "gpt2.py",
}


def main() -> None:
    """Compare, print, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trial-time", type=float, default=1.0, help="timed seconds of each run")
    parser.add_argument("--trials", type=int, default=10, help="of each search")
    parser.add_argument("--max-time", type=float, default=240.0, help="seconds of each search")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.case or CASES:
        for row in compare(name, arguments):
            save_rows("comparison", "cpu", [row])
            print(told(row), flush=True)
            rows.append(row)
    tight = [row["ratio"] for row in rows if row["budget"] == "tight" and row["ratio"] is not None]
    if tight:
        mean = math.exp(statistics.fmean(map(math.log, tight)))
        print(f"tight budgets: {mean:.2f} times the fastest other, geometric mean of {len(tight)} (bar {TIGHT_MEAN})")


def compare(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each budget of a job."""
    task, rows = str(CASES[name]), []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        Where("local").open(task, "cpu") as executor,
    ):
        facts = inspect(SearchOptions(task=task, device="cpu"), executor, TimeBudget(600.0, None))
        runs = Runs(executor, Requests(task, 0, Budget(device="cpu"), facts))
        own_bytes, one_bytes = (
            runs.peak_bytes(settings) or 0 for settings in (reference_settings(facts), Settings(batch=Batch(micro=1)))
        )
        assert own_bytes > one_bytes > 0, "the job trains, and its batch takes memory"
        tight_bytes = one_bytes + TIGHT * (own_bytes - one_bytes)
        for budget, limit in (("loose", int(LOOSE * own_bytes)), ("tight", int(tight_bytes))):
            picked = {**others(facts, runs, limit), "the plan": planned(task, limit, executor, arguments)}
            measured = in_turn(runs, picked, arguments.rounds, arguments.trial_time)
            row = {
                "case": name,
                "budget": budget,
                "limit_bytes": limit,
                "own_bytes": own_bytes,
                "threads": facts.num_threads,
            }
            rows.append({**row, "picked": picked_rows(picked, measured), **verdict(measured)})
    return rows


class Runs:
    """Runs configurations of a task in fresh processes, and remembers which peaks it has seen."""

    def __init__(self, executor: Executor, requests: Requests) -> None:
        self._executor, self._requests = executor, requests
        self._peaks: dict[str, int | None] = {}

    def measure(self, settings: Settings, share_s: float) -> Measurement | None:
        """None where it failed."""
        options = self._requests.measure_options(settings, share_s, None, enforce=False)
        request = self._requests.request("compare", settings, options.model_copy(update={"parity_batch": None}), 600.0)
        outcome = self._executor.ask(request.model_copy(update={"fresh": True}))
        return outcome.measurement if isinstance(outcome, Measured) else None

    def peak_bytes(self, settings: Settings) -> int | None:
        """Of a short run; None where it failed."""
        key = settings.model_dump_json(exclude_defaults=True)
        if key not in self._peaks:
            found = self.measure(settings, FIT_S)
            self._peaks[key] = None if found is None else found.peak.process
        return self._peaks[key]

    def fits(self, limit: int) -> Callable[[Settings], bool]:
        """Whether a configuration's measured peak is within the limit, to the byte: others keep no margin."""

        def fits(settings: Settings) -> bool:
            peak = self.peak_bytes(settings)
            return peak is not None and peak <= limit

        return fits


def others(facts: Facts, runs: Runs, limit: int) -> dict[str, Settings | None]:
    """What a user would pick instead; None where nothing of it fits."""
    fits, own = runs.fits(limit), reference_settings(facts)
    effective, length = facts.effective_batch, facts.dataset_length or facts.effective_batch
    compiled = own.model_copy(update={"compile": Compile(kind="model")})

    def largest(sizes: tuple[int, ...]) -> Settings | None:
        found = first_that_fits(sizes, lambda size: fits(Settings(batch=Batch(micro=size))))
        return None if found is None else Settings(batch=Batch(micro=found))

    return {
        "the job as it is": own if fits(own) else None,
        "auto_find_batch_size": largest(auto_find_sizes(effective)),
        "scale_batch_size": largest(power_sizes(length)),
        "by hand": by_hand(facts, fits),
        "torch.compile": compiled if facts.no_compiler is None and fits(compiled) else None,
    }


def by_hand(facts: Facts, fits: Callable[[Settings], bool]) -> Settings | None:
    """bf16, channels_last for convolutions, the largest power of two that fits, of the job's own batch, accumulated to
    it; every block recomputed where not even one sample fits otherwise."""
    sizes = tuple(size for size in power_sizes(facts.effective_batch) if size <= facts.effective_batch)
    rows: dict[str, Any] = {"precision": {"kind": "bf16"}}
    if facts.conv_dims:
        rows["memory_format"] = {"kind": "channels_last"}
    for checkpointing in ("none", "blocks"):
        choice = {**rows, "checkpointing": {"kind": checkpointing}}

        def of(size: int, choice: dict[str, Any] = choice) -> Settings:
            return Settings.model_validate({**choice, "batch": Batch.of(facts.effective_batch, size)})

        found = first_that_fits(sizes, lambda size, of=of: fits(of(size)))
        if found is not None:
            return of(found)
    return None


def planned(task: str, limit: int, executor: Executor, arguments: argparse.Namespace) -> Settings | None:
    """What a search comes to; None where it finds nothing that fits in its time."""
    options = SearchOptions(
        task=task,
        budget=limit,
        allow_split=True,
        output=Path("plan.yaml"),
        device="cpu",
        trials=arguments.trials,
        trial_time=arguments.trial_time,
        max_time=arguments.max_time,
        storage=f"sqlite:///{Path.cwd()}/studies.db",
    )
    try:
        return search(options, executor, lambda event: None, threading.Event()).settings
    except AutotuneError as error:
        print(f"no plan: {error}", flush=True)
        return None


def in_turn(
    runs: Runs, picked: dict[str, Settings | None], rounds: int, share_s: float
) -> dict[str, list[Measurement]]:
    """By name, a measurement a round. Names that picked the same share it."""
    found: dict[str, list[Measurement]] = {name: [] for name, settings in picked.items() if settings is not None}
    for _ in range(rounds):
        done: list[tuple[Settings, Measurement | None]] = []
        for name in found:
            settings = picked[name]
            assert settings is not None
            known = next((entry for entry in done if entry[0] == settings), None)
            if known is None:
                known = (settings, runs.measure(settings, share_s))
                done.append(known)
            if known[1] is not None:
                found[name].append(known[1])
    return found


def picked_rows(
    picked: dict[str, Settings | None], measured: dict[str, list[Measurement]]
) -> dict[str, dict[str, Any] | None]:
    """By name, what was picked and each round's figures; None where nothing fits."""
    return {
        name: None
        if settings is None
        else {
            "settings": settings.model_dump(mode="json", exclude_defaults=True),
            "described": ", ".join(
                one.describe() for one in settings.techniques() if one.model_dump(exclude_defaults=True)
            ),
            "samples_per_s": [one.samples_per_s.value for one in measured[name]],
            "peak_bytes": [one.peak.process for one in measured[name]],
            "disturbed": max((one.disturbed for one in measured[name]), default=None),
        }
        for name, settings in picked.items()
    }


def verdict(measured: dict[str, list[Measurement]]) -> dict[str, Any]:
    """The plan's speed over the fastest other's, of each round, and their median."""
    speeds = {name: [one.samples_per_s.value for one in every] for name, every in measured.items() if every}
    plan = speeds.pop("the plan", None)
    if plan is None or not speeds:
        return {"fastest_other": None, "ratio": None, "ratios": []}
    best = max(speeds, key=lambda name: statistics.median(speeds[name]))
    ratios = [ours / other for ours, other in zip(plan, speeds[best], strict=False)]
    return {"fastest_other": best, "ratio": statistics.median(ratios), "ratios": ratios}


def told(row: dict[str, Any]) -> str:
    """A row in words."""
    lines = [f"{row['case']}, {row['budget']} budget, {row['limit_bytes'] / 2**20:.0f} MiB:"]
    for name, one in row["picked"].items():
        if one is None or not one["samples_per_s"]:
            lines.append(f"  {name}: nothing fits")
            continue
        speeds, peak = one["samples_per_s"], max(one["peak_bytes"]) / 2**20
        spread = f"{min(speeds):.3g} to {max(speeds):.3g}"
        lines.append(
            f"  {name}: {statistics.median(speeds):.3g} samples/s ({spread}), {peak:.0f} MiB: {one['described']}"
        )
    if row["ratio"] is not None:
        said = "within" if row["ratio"] >= NEVER_SLOWER else "BELOW"
        lines.append(f"  the plan over {row['fastest_other']}: {row['ratio']:.2f}, {said} the bar of {NEVER_SLOWER}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
