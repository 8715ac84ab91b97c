"""How much faster inference is by the plan of ``autotune search --inference`` than as it stands: eager, fp32, batches
of 8.

    python -m benchmarks.inference --keep  # fifteen minutes

Three models with random weights: an encoder of BERT's shape, a vision transformer, a convolutional net. Of each a
search; the gain is that of the plan's last rounds, by turns with the job as it stands, in fresh processes. Outputs are
within the tolerance, or there is no plan.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import autotune

from .rows import save_rows

JOBS = Path(__file__).with_name("inference_jobs")
MODELS = tuple(sorted(path.stem for path in JOBS.glob("*.py")))
WANTED = 1.5
"""Times the reference's speed."""


def measure(name: str, max_time: str, trials: int, latency: str | None) -> dict[str, Any]:
    """Search a plan of one model."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # what a search keeps goes with it
        options = {"max_time": max_time, "trials": trials, "trial_time": "10s", "max_latency": latency}
        plan = autotune.search(JOBS / f"{name}.py", executor="local", inference=True, **options)
    gain, found = plan.gain, plan.inference
    assert gain is not None
    assert found is not None
    evidence = [one for one in (plan.reference, plan.measured) if one is not None and one.latency is not None]
    return {
        "model": name,
        "speed": gain.speed,
        "low": gain.low,
        "high": gain.high,
        "turns": gain.turns,
        "memory": gain.memory,
        "tolerance": found.tolerance,
        "deviation": found.deviation,
        "settings": plan.settings.model_dump(mode="json", exclude_defaults=True),
        "samples_per_s": [one.samples_per_s.value for one in evidence],
        "latency_ms": [[1000 * one.latency.median_s, 1000 * one.latency.p95_s] for one in evidence],
        "threads": plan.environment.threads if plan.environment else None,
        "trials": plan.search.trials if plan.search else None,
        "notes": plan.notes,
    }


def main() -> None:
    """Search each model, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--max-time", default="5m", help="of each search")
    parser.add_argument("--trials", type=int, default=16, help="of each search")
    parser.add_argument("--max-latency", help="of a batch, such as 200ms")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/inference-cpu.jsonl")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only or MODELS:
        row = measure(name, arguments.max_time, arguments.trials, arguments.max_latency)
        interval = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
        print(
            f"{name}: {row['speed']:.2f}{interval} times eager fp32, {row['memory']:.2f} times its memory; outputs "
            f"differ by {row['deviation'] or 0:.2%}, {row['tolerance']:.0%} is allowed; {row['settings']}",
            flush=True,
        )
        if arguments.keep:
            save_rows("inference", "cpu", [row])
        rows.append(row)
    print(f"{sum(row['speed'] >= WANTED for row in rows)} of {len(rows)} reach {WANTED} times")


if __name__ == "__main__":
    main()
