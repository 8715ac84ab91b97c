"""The process's memory on real cards: predicted beside measured, by benchmark and card."""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from autotune.estimates import EstimateOptions
from autotune.estimates.cards import Card, on_device
from autotune.estimates.memory_model import MemoryModel
from autotune.estimates.memory_model_cache import MemoryModelCache
from autotune.estimates.predictor import Predictor
from autotune.estimates.tracing.work import Work
from autotune.estimates.types import Interval
from autotune.measure.profiling.allocations import Phase, Trace
from autotune.plan import Plan
from autotune.training.skip_init import skip_init
from autotune.units import MIB

from ..rows import save_rows
from .jobs import JOBS, LEFT_OUT, Job, has_convolutions
from .known import CARDS, FULL, OLDER_CUDNN, Known, total_mib
from .rungs import print_rungs
from .speed import print_speeds
from .vision import import_torchvision

Row = dict[str, Any]
_MEASURED = Path(__file__).parent / "measured" / "milabench.csv"
_LARGE = 8 * 1024 * MIB
_NUM_RUNGS = 200
_MEDIAN_BAR, _P95_BAR, _ABOVE_BAR, _SMALL_BAR = 0.02, 0.06, 0.05, 400 * MIB


def main() -> None:
    """Print and keep a row for each measurement, and how far off they are together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--card", choices=CARDS, action="append", help="default: all")
    parser.add_argument("--rungs", action="store_true", help="timm's largest batches on an RTX 3090 instead")
    parser.add_argument("--speed", action="store_true", help="milabench's batch curves as searches instead")
    parser.add_argument("--model", action="append", help="of timm, with --rungs; default: every family's in turn")
    parser.add_argument("--most", type=int, default=_NUM_RUNGS, help="models, with --rungs")
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results")
    arguments = parser.parse_args()
    if arguments.rungs:
        print_rungs(arguments.model, arguments.most, arguments.keep)
        return
    if arguments.speed:
        print_speeds(_MEASURED, arguments.keep)
        return
    rows: list[Row] = []
    for name in arguments.job or JOBS:
        try:
            rows += _rows(name, arguments.card or CARDS)
        except ModuleNotFoundError as error:
            print(f"{name}: left out: {error}")
    for name, reason in () if arguments.job else LEFT_OUT.items():
        print(f"{name}: left out: {reason}")
    for known in get_args(Known):
        for line in _verdict([row for row in rows if row["known"] == known]):
            print(f"{known}, {line}")
    if arguments.keep:
        print(save_rows("cards", "cpu", rows))


def _rows(name: str, cards: Iterable[str]) -> list[Row]:
    """Those of a benchmark, printed. A peak that is less than its weights in half precision was not the training's."""
    rows: list[Row] = []
    least_mib = 2e6 * _job(name).num_parameters / MIB
    for card in cards:
        found = [_row(one) for one in measured(name, card) if float(one["mib"]) >= least_mib]
        rows += found
        if found:
            print(f"{name} on {card}: " + "; ".join(map(_told, _shown(found))), flush=True)
    return rows


def measured(job: str, card: str) -> Iterator[dict[str, str]]:
    """Rows of one job on one card that did not fill it, by batch."""
    with _MEASURED.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["job"] == job and row["card"] == card]
    for row in sorted(rows, key=lambda row: int(row["batch"])):
        if float(row["mib"]) <= FULL * total_mib(card):
            yield row


def _row(one: dict[str, str]) -> Row:
    batch, peak = int(one["batch"]), round(float(one["mib"]) * MIB)
    card = CARDS[one["card"]]
    found = _predictor(one["job"], card).process(batch, _job(one["job"]).settings).plus(card.driver_mib * MIB)
    return {
        "job": one["job"],
        "known": _job(one["job"]).known,
        "card": one["card"],
        "batch": batch,
        "measured_bytes": peak,
        "predicted_bytes": found.value,
        "low_bytes": found.low,
        "high_bytes": found.high,
        "error": found.value / peak - 1,
    }


@cache
def _job(name: str) -> Job:
    import_torchvision()
    job = JOBS[name]()
    _check(name, job)
    return job


@dataclass(frozen=True)
class _ClearedLate:
    """A memory model of a job that clears its gradients between forward and backward: the last step's are there until
    then, where backward left them."""

    memory_model: MemoryModel

    def at(self, batch: int) -> Trace:
        """The step's allocations: a gradient dies in the step after its own, at a moment before its birth."""
        trace = self.memory_model.at(batch)
        cleared = next(span.start for span in trace.spans if span.phase == Phase.BACKWARD)
        late = (
            replace(one, died=cleared) if one.kind == "gradient" and one.born > cleared else one
            for one in trace.allocations
        )
        return replace(trace, allocations=tuple(late))

    def interval(self, batch: int) -> Interval:
        """The tensors' peak."""
        found = self.memory_model.interval(batch)
        return found.plus(self.at(batch).peak_bytes() - found.value)

    def possible_bytes(self, batch: int) -> int:
        """As of any job."""
        return self.memory_model.possible_bytes(batch)

    def work(self, batch: int) -> tuple[Work, Work]:
        """As of any job."""
        return self.memory_model.work(batch)


class _Traced(MemoryModelCache):
    """Traces a job once for all cards."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.task, None, "cuda")
        self._clears_late = job.clears_late
        self._models: dict[bool, Any] = {}

    def of(self, plan: Plan, accumulates: bool, few: int | None = None) -> Any:
        """As that of the first card that asked."""
        if accumulates not in self._models:
            found = super().of(plan, accumulates, few)
            self._models[accumulates] = _ClearedLate(found) if self._clears_late else found
        return self._models[accumulates]


@cache
def _traced(name: str) -> MemoryModelCache:
    return _Traced(_job(name))


@cache
def _predictor(name: str, card: Card) -> Predictor:
    """Of a job on a card. Gradients that are never cleared are there in forward, as they are from the second of two
    accumulated micro-batches on."""
    job = _job(name)
    convolves = has_convolutions(job.task)
    on_card = on_device(card.device, convolves, job.tries_kernels)
    options = EstimateOptions(
        settings=job.settings,
        **on_card | {"context": on_card["context"].plus(OLDER_CUDNN * (convolves and not card.is_amd))},
        reference_batch=2**20 if job.has_gradients_in_forward else 1,
        is_held=job.has_gradients_in_forward,
    )
    return Predictor(job.task, options, memory_models=_traced(name))


def _check(name: str, job: Job) -> None:
    found = sum(one.numel() for one in skip_init(job.task).build_model().parameters()) / 1e6
    if abs(found - job.num_parameters) > 0.006 * job.num_parameters:
        raise SystemExit(f"{name}: {found:.2f} million parameters, but milabench's has {job.num_parameters:.2f}")


def _shown(rows: Sequence[Row]) -> Sequence[Row]:
    return rows if len(rows) <= 3 else (rows[0], rows[len(rows) // 2], rows[-1])


def _told(row: Row) -> str:
    low, value, high, peak = (row[f"{key}_bytes"] / MIB for key in ("low", "predicted", "high", "measured"))
    return f"{row['batch']}: {peak:.0f} MiB, predicted {value:.0f} ({low:.0f} to {high:.0f}), {row['error']:+.1%}"


def _verdict(rows: Sequence[Row]) -> Iterator[str]:
    large = [row for row in rows if row["measured_bytes"] > _LARGE]
    small = [row for row in rows if row["measured_bytes"] <= _LARGE]
    if large:
        errors = sorted(abs(row["error"]) for row in large)
        above = sum(row["measured_bytes"] > row["high_bytes"] for row in large)
        median, p95 = statistics.median(errors), errors[min(len(errors) - 1, round(0.95 * len(errors)))]
        within = median <= _MEDIAN_BAR and p95 <= _P95_BAR and above <= _ABOVE_BAR * len(large)
        yield (
            f"above 8 GiB, {len(large)} rows: off by {median:.1%} at the median, {p95:.1%} at the 95th percentile, "
            f"{errors[-1]:.1%} at worst; {above} above the interval: {'within' if within else 'OVER'} the bars of "
            f"{_MEDIAN_BAR:.0%}, {_P95_BAR:.0%} and {_ABOVE_BAR:.0%} of rows"
        )
    if small:
        worst = max(abs(row["predicted_bytes"] - row["measured_bytes"]) for row in small)
        yield (
            f"below 8 GiB, {len(small)} rows: off by {worst / MIB:.0f} MiB at worst: "
            f"{'within' if worst <= _SMALL_BAR else 'OVER'} the bar of {_SMALL_BAR / MIB:.0f} MiB"
        )


if __name__ == "__main__":
    main()
