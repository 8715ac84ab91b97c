"""What replays came to, in words and tables."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from .table import BUDGETS, Table

__all__ = ["report", "summary"]

AFTER = (6, 12, 24)
"""Trials after which regret is stated."""
OVER = ("over_budget", "in_margin")
"""What is listed of each replay: trials that used more than the budget, and that fit it but for the margin."""
MEDIAN_BAR, TAIL_BAR = 0.01, 0.03
"""Regret that is wanted at the median, and at the 95th percentile."""


def report(table: Table, rows: Sequence[dict[str, Any]]) -> str:
    """One table's competitors x budgets."""
    lines = [
        f"\n{table.name}: {len(table.entries)} configurations, standard error of a mean {table.relative_error:.1%}; "
        + ", ".join(f"{name} {table.limit_bytes(name) / 2**20:.0f} MiB" for name in BUDGETS),
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


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """All tables together: each competitor's worst table and budget."""
    lines = ["\nall tables and budgets, the worst of each:"]
    for name in dict.fromkeys(row["competitor"] for row in rows):
        own = [row for row in rows if row["competitor"] == name]
        worst = [max(regret(row["runs"], 12, share) for row in own) for share in (0.5, 0.95)]
        over, margin = (_share([run for row in own for run in row["runs"]], what) for what in OVER)
        shares = f"over budget {over:5.1%}, in the margin {margin:5.1%}"
        lines.append(f"  {name:22} after 12: {worst[0]:6.1%} /{worst[1]:6.1%}  {shares}" + _stops(own))
    return "\n".join(lines)


def regret(runs: Sequence[dict[str, Any]], num_trials: int, share: float) -> float:
    """The quantile ``share`` over the replays; 1 where nothing was found."""
    values = sorted(run["regrets"][min(num_trials, len(run["regrets"])) - 1] if run["regrets"] else 1.0 for run in runs)
    return float(values[min(int(share * len(values)), len(values) - 1)])


def needed(runs: Sequence[dict[str, Any]]) -> int | None:
    """Trials until median and 95th percentile are within the bars, and stay; None where they never are."""
    longest = max(len(run["regrets"]) for run in runs)
    for number in range(longest, 0, -1):
        if regret(runs, number, 0.5) > MEDIAN_BAR or regret(runs, number, 0.95) > TAIL_BAR:
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
    return f"  {row['competitor']:22}{columns}{needed(runs) or '-':>8}{over:6.0%}{margin:7.0%}{seconds:6.0f}" + _stops(
        [row]
    )


def _stops(rows: Iterable[dict[str, Any]]) -> str:
    """Of those that stop because they expect no more."""
    stops = [run for row in rows for run in row["runs"] if run["stopped"] and "chance" in run["stopped"]]
    if not stops:
        return ""
    behind = statistics.fmean(run["regrets"][-1] > MEDIAN_BAR if run["regrets"] else True for run in stops)
    return f"  {statistics.fmean(len(run['regrets']) for run in stops):4.1f} trials, {behind:.0%} too early"


def _by_budget(row: dict[str, Any]) -> int:
    return list(BUDGETS).index(row["budget"])
