"""What each part of a search's machinery is worth: the replays of `benchmarks.replay` without it.

    python -m benchmarks.ablation --variant "prior alone" --seeds 20 --keep
    python -m benchmarks.ablation --kept                  # docs/evidence/ablation.md, from the newest kept rows

A variant changes who proposes, or what is predicted of the tables' configurations. Rows of parts that are gone were
kept when they went.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from autotune.estimates import Prediction
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator
from autotune.units import MIB

from .kernel_rules import ALL, traced_as
from .replay.competitors import COMPETITORS
from .replay.gains import TABLES
from .replay.play import play
from .replay.report import summary
from .replay.table import BUDGETS, Entry, Table, load_table
from .rows import load_rows, save_rows

_NUM_TRIALS = 24
_PRELOADED_BYTES = 5 * MIB
"""What tcmalloc itself is charged in a prediction (``autotune.estimates.allocators.process``)."""
_ERROR, _SLACK_ERROR = 0.02, 0.75
"""Shares by which such a prediction may be off (the same)."""
_BASE_MIB = {"char_gpt": 349.0, "digits_cnn": 418.0, "gru_writer": 349.0}
"""Of tables with configurations on glibc, the process without tensors: the first two as measured
(`benchmarks/results/estimate-process-cpu.jsonl`), the third taken to be as the first, which imports as much."""


def main() -> None:
    """Replay variants, print what all tables come to together, keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=tuple(VARIANTS), action="append", help="may be given again; default: all")
    parser.add_argument("--table", type=Path, action="append", help="may be given again; default: all")
    parser.add_argument("--budget", choices=tuple(BUDGETS), action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/ablation-cpu.jsonl")
    parser.add_argument("--kept", action="store_true", help="replay nothing: what the newest kept rows come to")
    arguments = parser.parse_args()
    if arguments.kept:
        rows = load_rows("ablation", "cpu")
        print(summary(list({(row["competitor"], row["table"], row["budget"]): row for row in rows}.values())))
        return
    rows = []
    for path, variant, budget in itertools.product(
        arguments.table or TABLES, arguments.variant or VARIANTS, arguments.budget or BUDGETS
    ):
        competitor, changed = VARIANTS[variant]
        table = changed(load_table(path))
        replays = (play(table, budget, COMPETITORS[competitor], n, _NUM_TRIALS) for n in range(arguments.seeds))
        row = {
            "table": table.name,
            "competitor": variant,
            "budget": budget,
            "runs": [replay.as_row() for replay in replays],
        }
        rows.append(row)
        if arguments.keep:
            save_rows("ablation", "cpu", [row])
    print(summary(rows))


def _glibc_by_factor(table: Table) -> Table:
    """On glibc, tensors add to the process a multiple of what they add on tcmalloc, the same for all configurations, in
    place of a replayed heap; it is the mean of the other tables' medians."""
    others = [load_table(path) for path in TABLES if path.stem in _BASE_MIB and path.stem != table.name]
    factor = statistics.fmean(statistics.median(_factors(other)) for other in others)

    def predicted(entry: Entry) -> Prediction | None:
        added = _tensors_bytes(table, entry)
        if entry.predicted is None or added is None:
            return entry.predicted
        peak = _base_bytes(table) + factor * added
        high = (1 + _ERROR) * peak + _SLACK_ERROR * (factor - 1) * added
        return entry.predicted.model_copy(update={"peak_bytes": round(peak), "high_bytes": round(high)})

    return replace(table, entries=tuple(replace(entry, predicted=predicted(entry)) for entry in table.entries))


def _factors(table: Table) -> Iterator[float]:
    """Of each configuration on glibc, what was measured beyond the base over what is predicted on tcmalloc."""
    for entry in table.measured:
        added = _tensors_bytes(table, entry)
        if added is not None:
            yield (max(entry.peak_bytes) - _base_bytes(table)) / added


def _tensors_bytes(table: Table, entry: Entry) -> float | None:
    """Of a configuration on glibc, what is predicted beyond the base on tcmalloc; None where that is not known."""
    if table.name not in _BASE_MIB or entry.settings.allocator.kind != "system":
        return None
    on_tcmalloc = entry.settings.model_copy(update={"allocator": Allocator(kind="tcmalloc")})
    other = table.by_settings.get(on_tcmalloc.canonical())
    if other is None or other.predicted is None:
        return None
    return other.predicted.peak_bytes - _PRELOADED_BYTES - _base_bytes(table)


def _base_bytes(table: Table) -> float:
    return _BASE_MIB[table.name] * MIB


def _without_rules(table: Table) -> Table:
    """Without what kernels take for themselves, where that was traced."""
    rows = [row for row in load_rows("kernel-rules", table.device) if row["table"] == table.name]
    lacking = {Settings.model_validate(row["settings"]): row["peak_bytes"] - row["without_bytes"][ALL] for row in rows}

    def predicted(entry: Entry) -> Prediction | None:
        less = lacking.get(traced_as(entry.settings), 0)
        if entry.predicted is None or entry.predicted.high_bytes is None:
            return entry.predicted
        ends = {"peak_bytes": entry.predicted.peak_bytes - less, "high_bytes": entry.predicted.high_bytes - less}
        return entry.predicted.model_copy(update=ends)

    return replace(table, entries=tuple(replace(entry, predicted=predicted(entry)) for entry in table.entries))


def _same(table: Table) -> Table:
    return table


VARIANTS: dict[str, tuple[str, Callable[[Table], Table]]] = {
    "as it is": ("gain", _same),
    "gains of other tables": ("gain, other tables' gains", _same),
    "prior alone": ("prior alone", _same),
    "glibc by a factor": ("gain", _glibc_by_factor),
    "no rules of kernels": ("gain", _without_rules),
}
"""By its name, the competitor, and what is done to a table's predictions. The first of each kept row; of parts that are
gone, rows alone are left: "sampled hyperparameters"."""


if __name__ == "__main__":
    main()
