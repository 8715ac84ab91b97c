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
from pathlib import Path

from ..rows import load_rows, save_rows
from .competitors import COMPETITORS, replay
from .load import HOW, Load
from .report import report, summary
from .table import BUDGETS, load_table


def main() -> None:
    """Replay, print the table of competitors and budgets, keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--table", type=Path, action="append", help="may be given again")
    what.add_argument("--kept", action="store_true", help="replay nothing: what the newest kept rows come to together")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the tables were recorded on")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget", choices=tuple(BUDGETS), action="append", help="default: all")
    parser.add_argument("--competitor", choices=tuple(COMPETITORS), action="append", help="default: all")
    parser.add_argument("--trials", type=int, default=72, help="at most, in each replay")
    parser.add_argument("--load", type=float, help="other work begins that divides speeds by so much")
    parser.add_argument("--load-after", type=int, default=6, help="trials before it begins")
    parser.add_argument("--load-how", choices=HOW, default="anchors", help="what is made of the speeds that it leaves")
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/replay-<device>.jsonl")
    arguments = parser.parse_args()
    if arguments.kept:
        kept = load_rows("replay", arguments.device)
        print(summary(list({(row["table"], row["competitor"], row["budget"]): row for row in kept}.values())))
        return
    load = Load(arguments.load, arguments.load_after, arguments.load_how) if arguments.load else None
    if load and arguments.keep:
        parser.error("--keep is for replays without --load.")
    rows = []
    for table in (load_table(path, arguments.device) for path in arguments.table):
        games = itertools.product(arguments.competitor or COMPETITORS, arguments.budget or BUDGETS)
        found = list(replay(table, list(games), arguments.seeds, arguments.trials, load))
        print(report(table, found))
        rows += found
        if arguments.keep:
            print(save_rows("replay", table.device, found))
    if len(arguments.table) > 1:
        print(summary(rows))


if __name__ == "__main__":
    main()
