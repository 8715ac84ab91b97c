"""Replay searches over tables of measured configurations: which of them finds the fastest, after how many trials?

    python -m benchmarks.replay --table benchmarks/replay/tables/char_gpt.jsonl

A table is JSON lines of ``settings``, ``samples_per_s`` and ``peak_bytes`` (each repeat), and ``predicted`` (peak, and
operations and bytes of a sample, as known before measuring). Every competitor is asked for trials until they are used
up, at each budget and with each seed. Regret is how much slower the plan would be than the table's fastest that fits;
a difference within two standard errors of the table counts as none.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from autotune.measure.device import num_processors

from ..rows import save_rows
from .play import Replay, play
from .problem import Competitor, Space
from .report import report, summary
from .samplers import expected_gain, optuna_sampler
from .strategies import deepspeed, grid, lightning, paddle
from .table import BUDGETS, Table, load_table

COMPETITORS: dict[str, Competitor] = {
    "law": expected_gain(partial(Space.derived, beyond=1)),
    "law, raw space": expected_gain(Space.raw),
    **{
        f"{kind}, {name} space": optuna_sampler(kind, space)
        for kind, (name, space) in itertools.product(
            ("tpe", "gp", "random"), (("raw", Space.raw), ("derived", Space.derived))
        )
    },
    "grid": grid,
    "DeepSpeed-like": deepspeed,
    "Paddle-like": paddle,
    "Lightning-like": lightning,
}


def main() -> None:
    """Replay, print the table of competitors and budgets, keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, action="append", required=True, help="may be given again")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the tables were recorded on")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget", choices=tuple(BUDGETS), action="append", help="default: all")
    parser.add_argument("--competitor", choices=tuple(COMPETITORS), action="append", help="default: all")
    parser.add_argument("--trials", type=int, default=72, help="at most, in each replay")
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/replay-<device>.jsonl")
    arguments = parser.parse_args()
    rows = []
    for table in (load_table(path, arguments.device) for path in arguments.table):
        games = itertools.product(arguments.competitor or COMPETITORS, arguments.budget or BUDGETS)
        found = list(replay(table, list(games), arguments.seeds, arguments.trials))
        print(report(table, found))
        rows += found
        if arguments.keep:
            print(save_rows("replay", table.device, found))
    if len(arguments.table) > 1:
        print(summary(rows))


def replay(table: Table, games: list[tuple[str, str]], num_seeds: int, num_trials: int) -> Iterator[dict[str, Any]]:
    """A row for each competitor and budget of ``games``, with the replays of all seeds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the processes that are started next
    with ProcessPoolExecutor(num_processors(), get_context("spawn")) as pool:
        every = itertools.product(games, range(num_seeds))
        played = pool.map(partial(_play, table, num_trials), every, chunksize=2)
        for (competitor, budget), replays in itertools.groupby(
            zip(itertools.product(games, range(num_seeds)), played, strict=True), key=lambda pair: pair[0][0]
        ):
            runs = [replay.as_row() for _, replay in replays]
            yield {"table": table.name, "competitor": competitor, "budget": budget, "runs": runs}


def _play(table: Table, num_trials: int, game: tuple[tuple[str, str], int]) -> Replay:
    (competitor, budget), seed = game
    return play(table, budget, COMPETITORS[competitor], seed, num_trials)


if __name__ == "__main__":
    main()
