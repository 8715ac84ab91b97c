"""What pruning and low rank buy on six jobs that are trained first, by hand and by a search.

    python -m benchmarks.quality --part hand [--job mlp]    # 2 to 10 minutes a job, on one thread
    python -m benchmarks.quality --part search [--job mlp]  # 20 minutes a job

*hand*: torch-pruning and singular values alone. Each cut and the job as it stands are trained further on the same
batches, at a rate that falls to 0, and judged by the same examples; processor time of a step, in turn, on one thread,
with each set of exact choices. Rows that ``results/quality-hand-cpu.jsonl`` has already are not measured again.

*search*: an exact search and one with ``--max-quality-drop 1%``, each under ``--budget 2GiB``, which no job reaches;
then the plan found, the exact plan and the best cut by hand in pairs of processes that take turns, and each one's
quality on examples that no search has seen. Bars: 0.9 of the speed of the best by hand, no less than the exact plan's,
twice its search's seconds. The best by hand that is proven as a plan is stands beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ..rows import save_rows
from . import found, hand
from .jobs import JOBS, Job


def main() -> None:
    """Run a part, keep its rows, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("hand", "search"), required=True)
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "autotune-quality")
    parser.add_argument("--budget", default="2GiB", help="of each search")
    parser.add_argument("--trials", type=int, default=24, help="of each search")
    parser.add_argument("--trial-time", type=float, default=2.0, help="seconds of a trial, and of a turn")
    parser.add_argument("--max-time", type=float, default=None, help="seconds of each search; default: no limit")
    parser.add_argument("--pairs", type=int, default=3, help="of processes, for each comparison")
    parser.add_argument("--seeds", type=int, default=3, help="from which plans are judged on held-out examples")
    arguments = parser.parse_args()
    for name in arguments.job or JOBS:
        job = Job(name, arguments.cache)
        if arguments.part == "hand":
            print(hand.told(hand.table(job), job), flush=True)
            continue
        row = found.compare(job, arguments)
        save_rows("quality-search", "cpu", [row])
        print(found.told(row), flush=True)


if __name__ == "__main__":
    main()
