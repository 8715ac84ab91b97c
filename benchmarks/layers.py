"""What memory-saving layers save: bytes kept for backward, the true dynamic peak, and step time.

Stock layers, the published peer's where it can be imported, and ours, layer by layer and for whole models. Peaks and
times are ratios to stock's; what a layer keeps is a multiple of its input, beside the least that its backward needs.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from .layer_models import CASES, MODELS, freeze, loss_of
from .peer import HOW_TO_INSTALL, convert_to_memory_saving
from .rows import save_rows
from .single_layers import LAYERS
from .steps import KINDS, compare

Row = dict[str, Any]
_RATIOS = f"{'peak peer':>11}{'ours':>7}{'time peer':>11}{'ours':>7}{'spread':>14}"
_LAYER_HEADER = f"{'layer':34}{'trains':9}{'kept stock':>11}{'peer':>8}{'ours':>8}{'least':>8}{_RATIOS}"
_MODEL_HEADER = f"{'model':13}{'trains':14}{'kept MiB':>9}{'peer':>8}{'ours':>7}{'peak MiB':>9}{_RATIOS}"


def main() -> None:
    """Print and keep a row for each layer, and for each model and case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--layers", action="store_true", help="no models, layers alone")
    what.add_argument("--model", choices=tuple(MODELS), action="append", help="no layers, this model alone")
    parser.add_argument("--case", choices=CASES, action="append", help="what trains; default: as built, and input")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each, in turn")
    parser.add_argument("--kind", choices=tuple(KINDS), default="exact", help="of the technique `layers`")
    parser.add_argument("--batch", type=int, help="samples in a batch, of at most those that the models are built with")
    arguments = parser.parse_args()
    if convert_to_memory_saving is None:
        print(HOW_TO_INSTALL)
    if not arguments.model:
        _report(_LAYER_HEADER, _layer_line, _layer_rows(arguments))
    if not arguments.layers:
        _report(_MODEL_HEADER, _model_line, _model_rows(arguments))


def _report(header: str, line: Callable[[Row], str], rows: Iterator[Row]) -> None:
    print(header)
    found = []
    for row in rows:
        print(line(row), flush=True)
        found.append(row)
    if found:
        median = statistics.median(row["time_ratio"]["ours"] for row in found)
        print(f"step time, median over {len(found)} rows: {median:.3f} of stock")
        print(save_rows("layers", "cpu", found))


def _layer_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    for name, layer in LAYERS.items():
        for case, least in layer.cases():
            torch.manual_seed(0)
            model, x = layer.build_case(case), layer.build_input()
            row = compare(model, functools.partial(layer.loss, x=x), arguments.rounds, arguments.kind)
            yield {"layer": name, "case": case, "input_bytes": x.nbytes, "least": least, **row}


def _model_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Each in a process of its own, as a job runs: what one has left in malloc's hands changes the next one's time."""
    cases = [(name, case) for name in arguments.model or MODELS for case in arguments.case or ("as built", "input")]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as process:
        for name, case in cases:
            row = process.submit(_model_row, name, case, arguments).result()
            if row is not None:
                yield row


def _model_row(name: str, case: str, arguments: argparse.Namespace) -> Row | None:
    """None where nothing of the model trains in this case."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    freeze(model, case)
    if case != "input" and not any(p.requires_grad for p in model.parameters()):
        return None
    inputs = {key: value[: arguments.batch] for key, value in inputs.items()}
    loss = functools.partial(loss_of, inputs=inputs, case=case)
    row = compare(model, loss, arguments.rounds, arguments.kind)
    return {"model": name, "case": case, "batch": len(next(iter(inputs.values()))), **row}


def _layer_line(row: Row) -> str:
    kept = {key: value / row["input_bytes"] for key, value in row["kept_bytes"].items()}
    least = "" if row["least"] is None else f"{row['least']:.3f}"
    return (
        f"{row['layer']:34}{row['case']:9}{kept['stock']:11.3f}{_of_peer(row, kept):>8}{kept['ours']:8.3f}{least:>8}"
        f"{_ratios(row)}"
    )


def _model_line(row: Row) -> str:
    kept, peak = (row[key]["stock"] / 2**20 for key in ("kept_bytes", "peak_bytes"))
    ratio = row["kept_ratio"]
    return (
        f"{row['model']:13}{row['case']:14}{kept:9.1f}{_of_peer(row, ratio):>8}{ratio['ours']:7.3f}{peak:9.1f}"
        f"{_ratios(row)}"
    )


def _ratios(row: Row) -> str:
    peak, time = row["peak_ratio"], row["time_ratio"]
    low, high = row["time_spread"]["ours"]
    return (
        f"{_of_peer(row, peak):>11}{peak['ours']:7.3f}{_of_peer(row, time):>11}{time['ours']:7.3f}"
        f"{f'{low:.2f} to {high:.2f}':>14}"
    )


def _of_peer(row: Row, found: dict[str, float]) -> str:
    if row["peer_error"] is not None:
        return "raises"
    return f"{found['peer']:.3f}" if "peer" in found else "–"


if __name__ == "__main__":
    main()
