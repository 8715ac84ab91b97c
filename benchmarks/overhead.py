"""Time of a trial that is neither the user's code nor training steps, in real searches of a trivial task.

From the end of one trial to the end of the next, less the parity run, the warm-up and the timed windows: asking the
sampler, forking, loading the task's file, applying, measuring memory, bootstrapping, storing. The first trial in each
environment (an allocator is preloaded, so it needs a fork server of its own) is reported apart.
Bars: 0.3 s local, 0.5 s ray, at the median.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

from autotune.commands.where import Where
from autotune.searches.driver import search
from autotune.searches.events import Event, PredictionEnded, SearchStarted, Stopped, TrialEnded
from autotune.searches.options import SearchOptions
from autotune.workers import Measured

from .rows import HERE, save_rows

BARS_S = {"local": 0.3, "ray": 0.5}
_TRAINING = ("parity", "warmup", "timed")


def main() -> None:
    """Search once with each executor and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--executor", choices=("local", "ray"), action="append", help="default: both")
    parser.add_argument("--trials", type=int, default=20)
    arguments = parser.parse_args()
    rows = []
    for executor in arguments.executor or ("local", "ray"):
        found = measure_overhead(executor, arguments.device, arguments.trials)
        first = [row["overhead_s"] for row in found if row["first"]]
        later = [row["overhead_s"] for row in found if not row["first"]]
        median, bar = statistics.median(later), BARS_S[executor]
        verdict = "within" if median <= bar else "OVER"
        print(
            f"{executor}: {median:.3f} s per trial at the median, {max(later):.3f} s at most, over {len(later)} trials "
            f"({verdict} the bar of {bar} s); {max(first):.1f} s at most in each of {len(first)} new environments"
        )
        rows += found
    print(save_rows("overhead", arguments.device, rows))


def measure_overhead(
    executor: Literal["local", "ray"], device: Literal["cpu", "cuda"], trials: int
) -> list[dict[str, Any]]:
    """One row for each trial of one search: its overhead and its phases, seconds."""
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    stop = threading.Event()
    task = str(HERE / "trivial.py")

    def observe(event: Event) -> None:
        nonlocal since
        now = time.perf_counter()
        if isinstance(event, TrialEnded) and isinstance(event.outcome, Measured):
            phases = event.outcome.measurement.phases_s
            overhead = now - since - sum(phases[name] for name in _TRAINING)
            allocator = event.settings.allocator.kind
            row = {"executor": executor, "trial": event.number, "first": allocator not in seen}
            rows.append({**row, "overhead_s": round(overhead, 4), "phases_s": phases})
            seen.add(allocator)
        if isinstance(event, SearchStarted | PredictionEnded | TrialEnded):
            since = now
        if isinstance(event, Stopped):
            stop.set()  # the finalists are another matter

    with tempfile.TemporaryDirectory() as folder, Where(executor).open(task, device) as opened:
        options = SearchOptions(
            task=task,
            output=Path(folder, "plan.yaml"),
            device=device,
            trials=trials,
            trial_time=0.5,
            storage=f"sqlite:///{folder}/studies.db",
        )
        since = time.perf_counter()
        search(options, opened, observe, stop)
    return rows


if __name__ == "__main__":
    main()
