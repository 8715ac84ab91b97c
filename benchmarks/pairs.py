"""How far two pairs of fresh processes differ, of one plan and its reference by turns: what evidence.py assumes of it.

    python -m benchmarks.pairs [--job NAME]... [--pairs 8]  # 3 minutes a job

Each pair is a plan and the job as it stands in two fresh processes that take turns of a second. The logarithm of their
ratio varies from turn to turn within a pair, and from pair to pair. Printed is the standard deviation of both, the
second without what the first explains, and how far one pair's value may lie from all pairs': its trimmed mean, which a
search takes, and beside it its plain mean.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
from typing import Any

from autotune.commands.where import Where
from autotune.measure.timing.turns import trimmed_mean
from autotune.plan import Budget
from autotune.searches.options import SearchOptions
from autotune.searches.requests import Requests, inspect, reference_settings
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Settings
from autotune.workers import Compared, CompareRequest, Executor

from .rows import EXAMPLES, save_rows

JOBS = {
    "digits_cnn": {"memory_format": {"kind": "channels_last"}, "allocator": {"kind": "tcmalloc"}},
    "char_gpt": {"optimizer": {"kind": "fused"}},
}
_DEADLINE_S, _MOST_S = 120.0, 120.0
_ALWAYS_MORE = 1e-3
"""A precision that is never reached: turns end where they would not come to it, after six."""


def main() -> None:
    """Measure each job, keep its row, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--turn-time", type=float, default=1.0, help="seconds of a turn")
    parser.add_argument("--keep", action="store_true", help="add the row to results/pairs-cpu.jsonl")
    arguments = parser.parse_args()
    for name in arguments.job or JOBS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            row = measure(name, arguments)
        print(told(row), flush=True)
        if arguments.keep:
            save_rows("pairs", "cpu", [row])


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All pairs of one job."""
    path = str(EXAMPLES / name / "model.py")
    with Where(arguments.executor).open(path, "cpu") as executor:
        facts = inspect(SearchOptions(task=path, device="cpu"), executor, TimeBudget(_DEADLINE_S, None))
        requests, reference = Requests(path, 0, Budget(device="cpu"), facts), reference_settings(facts)
        plan = Settings.model_validate({**reference.model_dump(), **JOBS[name]})
        asked = taking_turns(requests, plan, reference, arguments.turn_time)
        pairs = [compared(executor, asked) for _ in range(arguments.pairs)]
    return {
        "job": name,
        "executor": arguments.executor,
        "turn_s": arguments.turn_time,
        "pairs": [
            {
                "seconds": round(pair.seconds, 1),
                "log_ratios": [round(turn.log_ratio, 4) for turn in pair.turns],
                "disturbed": [round(turn.disturbed, 4) for turn in pair.turns],
            }
            for pair in pairs
        ],
    }


def taking_turns(requests: Requests, one: Settings, other: Settings, turn_s: float) -> CompareRequest:
    """Asks for turns of two configurations, as many as a round may have."""
    alone = {"parity_batch": None, "evaluation": None}
    sides = (
        requests.request(
            "pair",
            row,
            requests.measure_options(row, turn_s, None, enforce=False).model_copy(update=alone),
            _DEADLINE_S,
        )
        for row in (one, other)
    )
    return CompareRequest.of(*sides, most_s=_MOST_S).model_copy(update={"turn_s": turn_s, "precision": _ALWAYS_MORE})


def compared(executor: Executor, asked: CompareRequest) -> Compared:
    """The answer.

    Raises:
        RuntimeError: a side failed.
    """
    outcome = executor.ask(asked)
    if not isinstance(outcome, Compared) or len(outcome.turns) < 2:
        raise RuntimeError(f"it could not be measured: {outcome}")
    return outcome


def told(row: dict[str, Any]) -> str:
    """A row in words."""
    ratios = [pair["log_ratios"] for pair in row["pairs"]]
    values, errors = zip(*map(trimmed_mean, ratios), strict=True)
    center = statistics.fmean(values)
    number = statistics.fmean(len(one) for one in ratios)
    within = statistics.fmean(statistics.stdev(one) for one in ratios)
    between = math.sqrt(max(0.0, statistics.variance(values) - statistics.fmean(error**2 for error in errors)))
    plain = [statistics.fmean(one) for one in ratios]
    off, off_plain = max(abs(value - center) for value in values), max(abs(value - center) for value in plain)
    disturbed = statistics.median(share for pair in row["pairs"] for share in pair["disturbed"])
    seconds = statistics.median(pair["seconds"] for pair in row["pairs"])
    return (
        f"{row['job']}: {math.exp(center):.3f}x; standard deviation {within:.1%} from turn to turn, "
        f"{between:.1%} from pair to pair; a pair is off by {off:.1%} at most, its plain mean by {off_plain:.1%}; "
        f"{seconds:.0f} s a pair of {number:.0f} turns, of which other work took {disturbed:.1%} at the median"
    )


if __name__ == "__main__":
    main()
