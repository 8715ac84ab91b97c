"""What memory-saving layers save: bytes kept for backward, the true dynamic peak, and step time, stock and converted.

Kept are the storages that autograd saves, each once, without parameters and buffers. The peak is the largest running
sum of allocations and frees over forward and backward, by torch's profiler. Steps of the two take turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autotune.layers import convert
from autotune.testing.kept import kept_bytes

from .layer_models import CASES, MODELS, freeze, loss_of
from .rows import save_rows


def main() -> None:
    """Print and keep a row for each model and case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), action="append", help="default: all")
    parser.add_argument("--case", choices=CASES, action="append", help="what trains; default: as built, and input")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each, in turn")
    parser.add_argument("--recompute", action="store_true", help="compute BatchNorm and ReLU again for convolutions")
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':13}{'trains':14}{'kept MiB':>10}{'ratio':>7}{'peak MiB':>10}{'ratio':>7}{'time':>7}{'spread':>14}")
    for name in arguments.model or MODELS:
        for case in arguments.case or ("as built", "input"):
            row = compare(name, case, arguments.rounds, arguments.recompute)
            if row is not None:
                rows.append(row)
                print(line(row), flush=True)
    if rows:
        median = statistics.median(row["time_ratio"] for row in rows)
        print(f"step time, median over {len(rows)} rows: {median:.3f} of stock")
        print(save_rows("layers", "cpu", rows))


def compare(name: str, case: str, rounds: int, recompute: bool) -> dict[str, Any] | None:
    """One row; None where nothing of the model trains in this case."""
    torch.manual_seed(0)
    stock, inputs = MODELS[name]()
    freeze(stock, case)
    if case != "input" and not any(p.requires_grad for p in stock.parameters()):
        return None
    models = {"stock": stock, "ours": convert(copy.deepcopy(stock), recompute=recompute)}
    steps = {key: _step(model, inputs, case) for key, model in models.items()}
    kept = {key: kept_bytes(lambda m=model: loss_of(m, inputs, case), model)[0] for key, model in models.items()}
    peaks = {key: peak_bytes(step) for key, step in steps.items()}
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(rounds):
        for key, step in steps.items():
            began_s = time.perf_counter()
            step()
            seconds[key].append(time.perf_counter() - began_s)
    ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["stock"], strict=True)]
    return {
        "model": name,
        "case": case,
        "recompute": recompute,
        "kept_bytes": kept,
        "kept_ratio": kept["ours"] / max(kept["stock"], 1),
        "peak_bytes": peaks,
        "peak_ratio": peaks["ours"] / max(peaks["stock"], 1),
        "seconds": seconds,
        "time_ratio": statistics.median(ratios),
        "time_spread": [min(ratios), max(ratios)],
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    low, high = row["time_spread"]
    return (
        f"{row['model']:13}{row['case']:14}{row['kept_bytes']['stock'] / 2**20:10.1f}{row['kept_ratio']:7.3f}"
        f"{row['peak_bytes']['stock'] / 2**20:10.1f}{row['peak_ratio']:7.3f}{row['time_ratio']:7.3f}"
        f"{f'{low:.2f} to {high:.2f}':>14}"
    )


def _step(model: nn.Module, inputs: dict[str, Any], case: str) -> Callable[[], None]:
    def step() -> None:
        torch.manual_seed(1)
        loss_of(model, inputs, case).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return step


def peak_bytes(step: Callable[[], None]) -> int:
    """The largest running sum of what a step allocates and frees."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None, "the block above has run"
    assert profiler.profiler.kineto_results is not None, "the block above has run"
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        largest = max(largest, total)
    return largest


if __name__ == "__main__":
    main()
