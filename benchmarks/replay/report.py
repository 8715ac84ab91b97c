"""What replays came to, in words and tables."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .table import BUDGETS, Table

AFTER = (6, 12, 24)
"""Trials after which regret is stated."""
OVER = ("over_budget", "in_margin")
"""What is listed of each replay: trials that used more than the budget, and that fit it but for the margin."""
MEDIAN_BAR, TAIL_BAR = 0.01, 0.03
"""Regret that is wanted at the median, and at the 95th percentile."""
BARS = {0.5: MEDIAN_BAR, 0.95: TAIL_BAR}
SURE = 0.95
"""Share of replays that hold the plan, which a search that stops at a chance of 5 % promises."""


def report(table: Table, rows: Sequence[dict[str, Any]]) -> str:
    """One table's competitors x budgets."""
    lines = [
        f"\n{table.name}: {len(table.entries)} configurations, standard error of a mean {table.relative_error:.1%}; "
        + ", ".join(f"{name} {table.limit_bytes(name) / 2**20:.0f} MiB" for name in BUDGETS),
        *_peaks(table),
        "regret after 6, 12, 24 trials: median / 95th percentile; trials until it is "
        f"<= {MEDIAN_BAR:.0%} / <= {TAIL_BAR:.0%}; over: share of the first 12 that used more than the budget; "
        "margin: that were within it by less than the margin; s: of the first 12",
    ]
    for budget, group in itertools.groupby(sorted(rows, key=_by_budget), key=lambda row: row["budget"]):
        lines.append(
            f"{budget:24}" + "".join(f"{'after ' + str(n):>15}" for n in AFTER) + "  needed  over margin     s  stops"
        )
        lines += [_line(row) for row in group]
    return "\n".join(lines)


def _peaks(table: Table) -> Iterator[str]:
    """How far the largest of the measured peaks lies from the predicted one, by allocator."""
    errors: dict[str, list[float]] = {}
    for entry in table.measured:
        if entry.predicted is not None:
            error = max(entry.peak_bytes) / entry.predicted.peak_bytes - 1
            errors.setdefault(entry.settings.allocator.kind, []).append(error)
    for allocator, found in errors.items():
        low, high = np.quantile(found, (0.05, 0.95))
        yield (
            f"measured peaks of {len(found)} configurations on {allocator}: {low:+.1%} to {high:+.1%} of the predicted "
            f"ones in nine of ten cases, {min(found):+.1%} to {max(found):+.1%} in all"
        )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """All tables together: competitors x budgets, of the replays of all tables; and how many tables and budgets have
    each within the bars."""
    lines = [
        "\nall tables together, regret after 12 trials: median / 95th percentile; until: trials until the median is "
        f"<= {MEDIAN_BAR:.0%}, by budget; sure: trials until {SURE:.0%} of all replays are; "
        f"met: tables and budgets that are <= {MEDIAN_BAR:.0%} / <= {TAIL_BAR:.0%} after 12 trials; "
        "s: of the first 12",
        f"{'':24}{''.join(f'{budget:>15}' for budget in BUDGETS)}"
        "  over margin        until   sure     met     s  stops",
    ]
    for name in dict.fromkeys(row["competitor"] for row in rows):
        own = [row for row in rows if row["competitor"] == name]
        by_budget = [[run for row in own if row["budget"] == budget for run in row["runs"]] for budget in BUDGETS]
        every = list(itertools.chain.from_iterable(by_budget))
        columns = "".join(f"{regret(runs, 12, 0.5):8.1%}/{regret(runs, 12, 0.95):6.1%}" for runs in by_budget if runs)
        over, margin = (_share(every, what) for what in OVER)
        until = ", ".join(str(needed(runs, {0.5: MEDIAN_BAR}) or "-") for runs in by_budget if runs)
        sure = needed(every, {SURE: MEDIAN_BAR}) or "-"
        met = sum(all(regret(row["runs"], 12, share) <= bar for share, bar in BARS.items()) for row in own)
        seconds = statistics.fmean(run["seconds_of_12"] for run in every)
        figures = f"{over:6.0%}{margin:7.0%}{until:>13}{sure:>7}{met:5}/{len(own):<2}{seconds:6.0f}"
        lines.append(f"  {name:22}{columns}{figures}" + _stops(own))
    return "\n".join(lines)


def regret(runs: Sequence[dict[str, Any]], num_trials: int, share: float) -> float:
    """The quantile ``share`` over the replays; 1 where nothing was found."""
    values = sorted(run["regrets"][min(num_trials, len(run["regrets"])) - 1] if run["regrets"] else 1.0 for run in runs)
    return float(values[min(int(share * len(values)), len(values) - 1)])


def needed(runs: Sequence[dict[str, Any]], bars: Mapping[float, float]) -> int | None:
    """Trials until the quantiles are within their bars, and stay; None where they never are."""
    longest = max(len(run["regrets"]) for run in runs)
    for number in range(longest, 0, -1):
        if any(regret(runs, number, share) > bar for share, bar in bars.items()):
            return None if number == longest else number + 1
    return 1


def _share(runs: Sequence[dict[str, Any]], what: str) -> float:
    """Of the first 12 trials, those that are listed under ``what``; the mean over the replays."""
    return statistics.fmean(
        sum(number <= 12 for number in run[what]) / max(1, min(12, len(run["regrets"]))) for run in runs
    )


def _line(row: dict[str, Any]) -> str:
    runs = row["runs"]
    columns = "".join(f"{regret(runs, n, 0.5):8.1%}/{regret(runs, n, 0.95):6.1%}" for n in AFTER)
    over, margin = (_share(runs, what) for what in OVER)
    seconds = statistics.fmean(run["seconds_of_12"] for run in runs)
    figures = f"{needed(runs, BARS) or '-':>8}{over:6.0%}{margin:7.0%}{seconds:6.0f}"
    return f"  {row['competitor']:22}{columns}{figures}" + _stops([row])


def _stops(rows: Iterable[dict[str, Any]]) -> str:
    """Of those that stop because they expect no more."""
    stops = [run for row in rows for run in row["runs"] if run["stopped"] and "stopped after" in run["stopped"]]
    if not stops:
        return ""
    behind = statistics.fmean(run["regrets"][-1] > MEDIAN_BAR if run["regrets"] else True for run in stops)
    return f"  {statistics.fmean(len(run['regrets']) for run in stops):4.1f} trials, {behind:.0%} too early"


def _by_budget(row: dict[str, Any]) -> int:
    return list(BUDGETS).index(row["budget"])
