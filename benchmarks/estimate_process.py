"""How well a process's peak is known without running: predicted against what trials are charged.

Each configuration is measured in fresh interpreters, as plans are; for the models of malloc see
``autotune/estimates/allocators/process.py``, for that of CUDA's ``autotune/estimates/allocators/cuda_caching.py``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from autotune.estimates import EstimateOptions
from autotune.measure import MeasureOptions
from autotune.plan import Budget, Plan
from autotune.searches.options import SearchOptions
from autotune.searches.requests import inspect
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Device, Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.memory_format import MemoryFormat
from autotune.techniques.precision import Precision
from autotune.workers import Estimated, Executor, Measured, MeasureRequest, PredictRequest
from autotune.workers.local import LocalExecutor
from autotune.workers.trial.environment import own_thread_variables

from .rows import EXAMPLES, save_rows

Row = dict[str, Any]
_TASKS = ("char_gpt", "digits_cnn")
_ON_IMAGES = ("digits_cnn",)


def main() -> None:
    """Print and keep a row for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, action="append", help="micro-batches; default: 16, 64 and 256")
    parser.add_argument("--repeats", type=int, default=2, help="fresh interpreters of each")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with LocalExecutor() as executor:
        for task in _TASKS:
            options = SearchOptions(task=str(EXAMPLES / task / "model.py"), device=arguments.device)
            card = inspect(options, executor, TimeBudget(1.0, None)).device
            for settings, batch in itertools.product(_combinations(task), arguments.batch or [16, 64, 256]):
                rows.append(_row(executor, card, task, settings, batch, arguments.repeats))
                print(_line(rows[-1]), flush=True)
    slack = [row["slack"] for row in rows]
    print(f"slack over the tensors: median {statistics.median(slack):.1%}, {min(slack):.1%} to {max(slack):.1%}")
    outside = sum(max(row["measured_bytes"]) > row["high_bytes"] for row in rows)
    print(f"above the interval: {outside} of {len(rows)}")
    print(save_rows("estimate-process", arguments.device, rows))


def _combinations(task: str) -> Iterator[Settings]:
    formats = ("contiguous", "channels_last") if task in _ON_IMAGES else ("contiguous",)
    for precision, blocks, kind in itertools.product(("fp32", "bf16"), ("none", "blocks"), formats):
        yield Settings(
            precision=Precision(kind=precision),
            checkpointing=Checkpointing(kind=blocks),
            memory_format=MemoryFormat(kind=kind),
        )


def _row(executor: Executor, card: Device, task: str, settings: Settings, batch: int, repeats: int) -> Row:
    estimated = executor.submit(_estimate_request(card, task, settings, batch)).result()
    assert isinstance(estimated, Estimated), estimated
    found = estimated.estimate
    measured = [executor.submit(_measure_request(card, task, settings, batch)).result() for _ in range(repeats)]
    peaks = [one.measurement.peak.process for one in measured if isinstance(one, Measured)]
    assert len(peaks) == repeats, measured
    tensors = found.reference.tensors.value
    return {
        "task": task,
        "settings": settings.model_dump(mode="json", exclude_defaults=True),
        "batch": batch,
        "base_bytes": found.base_bytes,
        "tensors_bytes": tensors,
        "predicted_bytes": found.reference.process.value,
        "low_bytes": found.reference.process.low,
        "high_bytes": found.reference.process.high,
        "measured_bytes": peaks,
        "slack": (statistics.median(peaks) - found.base_bytes) / tensors - 1,
        "error": found.reference.process.value / statistics.median(peaks) - 1,
    }


def _estimate_request(card: Device, task: str, settings: Settings, batch: int) -> PredictRequest:
    return PredictRequest(
        id=f"estimate-{task}-{batch}",
        task=str(EXAMPLES / task / "model.py"),
        device="cpu",
        options=EstimateOptions(settings=settings, target=card.type, capability=card.capability, reference_batch=batch),
        environment=own_thread_variables(),
    )


def _measure_request(card: Device, task: str, settings: Settings, batch: int) -> MeasureRequest:
    return MeasureRequest(
        id=f"measure-{task}-{batch}",
        task=str(EXAMPLES / task / "model.py"),
        device=card.type,
        plan=Plan(settings=settings.model_copy(update={"batch": Batch(micro=batch)}), budget=Budget(device=card.type)),
        options=MeasureOptions(trial_time_s=2.0, enforce=False, parity_batch=batch, parity_last=True),
        fresh=True,
        environment=own_thread_variables(),
    )


def _line(row: Row) -> str:
    kinds = " ".join(value["kind"] for value in row["settings"].values()) or "-"
    base, tensors, predicted, low, high = (
        row[f"{key}_bytes"] / 2**20 for key in ("base", "tensors", "predicted", "low", "high")
    )
    peaks = ", ".join(f"{peak / 2**20:.0f}" for peak in row["measured_bytes"])
    return (
        f"{row['task']:12}{row['batch']:4} {kinds:14} base {base:4.0f} tensors {tensors:5.0f}, "
        f"predicted {predicted:5.0f} ({low:.0f} to {high:.0f}), measured {peaks} MiB: "
        f"slack {row['slack']:+.1%}, error {row['error']:+.1%}"
    )


if __name__ == "__main__":
    main()
