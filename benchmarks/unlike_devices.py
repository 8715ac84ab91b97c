"""What unequal shares gain over equal ones where two ranks are of unlike speed, against the most that they could.

    python -m benchmarks.unlike_devices --keep
    python -m benchmarks.unlike_devices --search --keep

Two gloo processes train one model. One is slower by a sleep for each sample in its loss: emulated, since two processors
that others use too give no steady ratio. Each times its micro-batches alone, through ``autotune.apply``; shares follow
of that, by what was measured alone. With ``--search``, plans and shares are instead those of a bundle that ``autotune
search --devices`` wrote, over a Ray cluster of two nodes that differ in their processors and in that sleep. Equal and
unequal shares then take turns. Bound: the sum of the speeds alone over twice the lower one. Bar: at least 0.95 of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from typing import Any

import torch

import autotune
from autotune.plan import Plan
from autotune.ranks import gathered
from autotune.searches.winner.shares import Timed, quickest, share_out
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.parallel import Parallel

from .rows import save_rows
from .unlike_ranks import EFFECTIVE, TASK, Node, alternated, compared, grouped, on_both, seconds
from .unlike_search import searched

BAR = 0.95
MICROS = (1, 2, 4, 8)
SAMPLE_S = 0.002
"""Of the faster rank."""
ROUNDS = 3


def main() -> None:
    """Run each ratio and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", type=float, nargs="+", help="default: 1.5 2 3; with --search 2")
    parser.add_argument("--search", action="store_true", help="plans and shares of a real search on two Ray nodes")
    parser.add_argument("--trials", type=int, default=6, help="of each search")
    parser.add_argument("--trial-time", default="1.5s", help="of each trial's timed steps")
    parser.add_argument("--keep", action="store_true", help="add rows to benchmarks/results/")
    arguments = parser.parse_args()
    rows = []
    for ratio in arguments.ratios or ([2.0] if arguments.search else [1.5, 2.0, 3.0]):
        pair = SAMPLE_S, SAMPLE_S * ratio
        found = searched(pair, arguments.trials, arguments.trial_time) if arguments.search else compare(pair)
        rows.append({"ratio": ratio, "effective": EFFECTIVE, **found})
    for row in rows:
        verdict = "holds" if row["of_bound"] >= BAR else "SHORT"
        most = f"{row['gain']:.3f}x of at most {row['bound']:.3f}x"
        print(
            f"ratio {row['ratio']}: shares {row['shares']}, {row['even_per_s']:.0f} -> {row['shared_per_s']:.0f} "
            f"samples/s, {most}: {row['of_bound']:.3f} (bar {BAR}: {verdict})"
        )
    if arguments.keep:
        print(save_rows("unlike-devices-search" if arguments.search else "unlike-devices", "cpu", rows))


def compare(sample_s: tuple[float, float]) -> dict[str, Any]:
    """Both splits on a pair of ranks whose samples take so long; one row."""
    every = frozenset(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        return on_both([Node(every, one) for one in sample_s], _in_each, folder)


def _in_each(rank: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = autotune.load_task(str(TASK))
    mine = [_timed(task, micro) for micro in MICROS]
    parallel = Parallel(kind="ddp", processes=2, effective=EFFECTIVE)
    with grouped(rank, folder):
        timed = [[Timed(*one) for one in row] for row in gathered(mine)]
        counts = share_out(timed, EFFECTIVE)
        splits = {
            name: _training(task, Batch.of(own[rank], quickest(timed[rank], own[rank]).micro), parallel)
            for name, own in {"even": [EFFECTIVE // 2] * 2, "shared": counts}.items()
        }
        per_s = alternated(splits, ROUNDS)
    alone_per_s = [max(one.micro / one.seconds for one in row) for row in timed]
    return {
        "alone_per_s": [round(one, 1) for one in alone_per_s],
        "shares": counts,
        "expected_s": [round(quickest(t, n).seconds_for(n), 4) for t, n in zip(timed, counts, strict=True)],
        **compared(per_s, alone_per_s),
    }


def _training(task: autotune.Task, batch: Batch, parallel: Parallel) -> autotune.Training:
    return autotune.apply(Plan(settings=Settings(batch=batch, parallel=parallel)), task)


def _timed(task: autotune.Task, micro: int) -> tuple[int, float]:
    """A micro-batch, and its seconds at the median of some epochs, this rank alone."""
    training = _training(task, Batch.of(EFFECTIVE, micro), Parallel())
    return micro, statistics.median(seconds(training) for _ in range(2)) * micro / EFFECTIVE


if __name__ == "__main__":
    main()
