"""How well the process is known once trials were measured: predictions of the replay's tables, calibrated by a few.

Of each table some configurations are drawn, as a search would have measured them, and the others are predicted. A
second time everything measured is so many MiB larger, as where a task brings libraries along that nothing traced.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.estimates import Interval
from autotune.searches.predicted.calibration import learn_calibration
from autotune.units import MIB

from .replay.table import Entry, load_table
from .rows import save_rows

TABLES = sorted((Path(__file__).parent / "replay" / "tables").glob("*.jsonl"))


def main() -> None:
    """Print and keep a row for each table and number of trials, and how far off predictions are together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, action="append", help="may be given again; default: 1, 3 and 8")
    parser.add_argument("--more", type=int, default=40, help="MiB, the second time")
    parser.add_argument("--draws", type=int, default=100, help="of trials, for each row")
    arguments = parser.parse_args()
    rows = []
    for more in (0, arguments.more):
        for trials in arguments.trials or (1, 3, 8):
            found = [_row(path, trials, more, arguments.draws) for path in TABLES]
            for row in found:
                print(_line(row), flush=True)
            rows += found
    print(save_rows("calibration", "cpu", rows))


def _row(path: Path, trials: int, more: int, draws: int) -> dict[str, Any]:
    entries = list(_predicted(load_table(path).entries, more * MIB))
    before, after = _Errors(), _Errors()
    chooser = random.Random(0)
    for _ in range(draws):
        chooser.shuffle(entries)
        learned = learn_calibration(entries[:trials])
        for interval, measured in entries[trials:]:
            before.note(interval, measured)
            after.note(learned.of(interval), measured)
    return {"table": path.stem, "trials": trials, "more_mib": more, "before": before.as_row(), "after": after.as_row()}


def _predicted(entries: Sequence[Entry], more_bytes: int) -> Iterator[tuple[Interval, int]]:
    for entry in entries:
        known = entry.predicted
        if known is not None and known.high_bytes is not None and entry.peak_bytes:
            interval = Interval(low=known.peak_bytes, value=known.peak_bytes, high=known.high_bytes)
            yield interval, max(entry.peak_bytes) + more_bytes


class _Errors:
    """Of predictions, as shares of what was measured."""

    def __init__(self) -> None:
        self._errors: list[float] = []
        self._above: list[bool] = []

    def note(self, interval: Interval, measured: int) -> None:
        """One prediction."""
        self._errors.append(abs(interval.value / measured - 1))
        self._above.append(measured > interval.high)

    def as_row(self) -> dict[str, float]:
        """As it is kept."""
        percentiles = statistics.quantiles(self._errors, n=100)
        return {
            "median": round(percentiles[49], 4),
            "percentile_95": round(percentiles[94], 4),
            "above": round(statistics.fmean(self._above), 4),
        }


def _line(row: dict[str, Any]) -> str:
    words = [f"{row['table']:14} {row['trials']:2} trials, {row['more_mib']:2} MiB more:"]
    for when in ("before", "after"):
        found = row[when]
        words.append(
            f"{when} {found['median']:5.1%} median, {found['percentile_95']:5.1%} 95th, {found['above']:5.1%} above"
        )
    return " ".join(words)


if __name__ == "__main__":
    main()
