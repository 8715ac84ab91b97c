"""How much faster inference is by the plan of ``autotune search --inference`` than as it stands: eager, fp32, batches
of 8.

    python -m benchmarks.inference --keep  # fifteen minutes
    python -m benchmarks.inference --runtimes --keep  # five minutes: the plans found beside other runtimes

Three models with random weights: an encoder of BERT's shape, a vision transformer, a convolutional net. Of each a
search; the gain is that of the plan's last rounds, by turns with the job as it stands, in fresh processes. Outputs are
within the tolerance, or there is no plan.

With ``--runtimes`` the newest plan that is kept of each model runs beside eager fp32, torch.compile and onnxruntime, by
turns in one process, on the same batch of 8 and as many threads. So none has another allocator, as a plan may.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import autotune
from autotune.measure.checks.outputs import held_against, packed_outputs
from autotune.measure.exports.program import export
from autotune.measure.exports.types import ExportOptions
from autotune.nested import tensors_in
from autotune.plan import Budget, Inference, Plan
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator
from autotune.techniques.batch import Batch
from autotune.techniques.compile import Compile
from autotune.techniques.precision import Precision

from .rows import load_rows, save_rows

JOBS = Path(__file__).with_name("inference_jobs")
MODELS = tuple(sorted(path.stem for path in JOBS.glob("*.py")))
WANTED = 1.5
"""Times the reference's speed."""


def measure(name: str, max_time: str, trials: int, latency: str | None) -> dict[str, Any]:
    """Search a plan of one model."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # what a search keeps goes with it
        options = {"max_time": max_time, "trials": trials, "trial_time": "10s", "max_latency": latency}
        plan = autotune.search(JOBS / f"{name}.py", executor="local", inference=True, **options)
    gain, found = plan.gain, plan.inference
    assert gain is not None
    assert found is not None
    evidence = [one for one in (plan.reference, plan.measured) if one is not None and one.latency is not None]
    return {
        "model": name,
        "speed": gain.speed,
        "low": gain.low,
        "high": gain.high,
        "turns": gain.turns,
        "memory": gain.memory,
        "tolerance": found.tolerance,
        "deviation": found.deviation,
        "settings": plan.settings.model_dump(mode="json", exclude_defaults=True),
        "samples_per_s": [one.samples_per_s.value for one in evidence],
        "latency_ms": [[1000 * one.latency.median_s, 1000 * one.latency.p95_s] for one in evidence],
        "threads": plan.environment.threads if plan.environment else None,
        "trials": plan.search.trials if plan.search else None,
        "notes": plan.notes,
    }


def runtimes(name: str, rounds: int, turn_s: float, int8: bool) -> list[dict[str, Any]]:
    """The same batch by turns in each runtime: samples per second, and times eager fp32 within each round."""
    import onnxruntime
    import torch

    task = autotune.load_task(str(JOBS / f"{name}.py"), inference=True)
    (*_, kept) = (row for row in load_rows("inference", "cpu") if row["model"] == name and "settings" in row)
    found = Settings.model_validate(kept["settings"]).having(Allocator())
    size = task.batch_size or 8

    def plan(settings: Settings) -> Plan:
        settings = settings.having(Batch(micro=size))
        return Plan(settings=settings, inference=Inference(tolerance=0.05), budget=Budget(device="cpu"))

    ways: dict[str, Callable[[], list[torch.Tensor]]] = {}
    for way, settings in {
        "eager fp32": Settings(),
        "the plan": found,
        "compiled fp32": Settings(compile=Compile(kind="model")),
    }.items():
        applied = autotune.apply(plan(settings), task)
        batch = next(iter(applied.loader))
        ways[way] = lambda applied=applied, batch=batch: [*tensors_in(applied.infer(batch))]  # type: ignore[misc]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    given = [one.numpy() for one in tensors_in(batch)]
    written = {"onnxruntime fp32": Settings()}
    if int8:
        written["onnxruntime int8"] = found.having(Precision())
    for way, settings in written.items():
        with tempfile.NamedTemporaryFile() as file:
            made = export(task, plan(settings), ExportOptions(to="onnx", file=file.name), 0, lambda doing: None)
            session = onnxruntime.InferenceSession(Path(file.name).read_bytes(), options)
        feeds = dict(zip(made.inputs, given, strict=True))
        ways[way] = lambda session=session, feeds=feeds: [*map(torch.from_numpy, session.run(None, feeds))]  # type: ignore[misc]
    reference = packed_outputs(ways["eager fp32"](), size)
    beside = {way: held_against(run(), size, reference, 0.05) for way, run in ways.items()}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            began_s, count = perf_counter(), 0
            while perf_counter() - began_s < turn_s:
                run()
                count += 1
            rates[way].append(count * size / (perf_counter() - began_s))
    rows = []
    for way, each in rates.items():
        ratios = sorted(one / eager for one, eager in zip(each, rates["eager fp32"], strict=True))
        rows.append(
            {
                "model": name,
                "runtime": way,
                "batch": size,
                "threads": torch.get_num_threads(),
                "samples_per_s": [round(one, 4) for one in each],
                "speed": round(statistics.median(ratios), 3),
                "low": round(ratios[0], 3),
                "high": round(ratios[-1], 3),
                "deviation": beside[way].deviation,
                "unlike": beside[way].unlike,
                "onnxruntime": onnxruntime.__version__,
                "load": os.getloadavg()[0],
            }
        )
        row = rows[-1]
        print(
            f"{name}: {way}: {row['speed']:.2f} ({row['low']:.2f} to {row['high']:.2f}) times eager fp32, outputs "
            f"differ by {row['deviation']:.2%}",
            flush=True,
        )
    return rows


def main() -> None:
    """Search each model, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--max-time", default="5m", help="of each search")
    parser.add_argument("--trials", type=int, default=16, help="of each search")
    parser.add_argument("--max-latency", help="of a batch, such as 200ms")
    parser.add_argument("--keep", action="store_true", help="add the rows to results/inference-cpu.jsonl")
    parser.add_argument("--runtimes", action="store_true", help="the kept plans beside other runtimes")
    parser.add_argument("--int8", action="store_true", help="with --runtimes: onnxruntime with the plan's int8, too")
    parser.add_argument("--rounds", type=int, default=5, help="with --runtimes: turns of each")
    parser.add_argument("--turn", type=float, default=1.0, help="with --runtimes: seconds of each turn, at least")
    arguments = parser.parse_args()
    if arguments.runtimes:
        for name in arguments.only or MODELS:
            rows = runtimes(name, arguments.rounds, arguments.turn, arguments.int8)
            if arguments.keep:
                save_rows("inference-runtimes", "cpu", rows)
        return
    rows = []
    for name in arguments.only or MODELS:
        row = measure(name, arguments.max_time, arguments.trials, arguments.max_latency)
        interval = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
        print(
            f"{name}: {row['speed']:.2f}{interval} times eager fp32, {row['memory']:.2f} times its memory; outputs "
            f"differ by {row['deviation'] or 0:.2%}, {row['tolerance']:.0%} is allowed; {row['settings']}",
            flush=True,
        )
        if arguments.keep:
            save_rows("inference", "cpu", [row])
        rows.append(row)
    print(f"{sum(row['speed'] >= WANTED for row in rows)} of {len(rows)} reach {WANTED} times")


if __name__ == "__main__":
    main()
