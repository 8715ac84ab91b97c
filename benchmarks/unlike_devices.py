"""What unequal shares gain over equal ones where two ranks are of unlike speed, against the most that they could.

    python -m benchmarks.unlike_devices --keep

Two gloo processes train one model. One is slower by a sleep for each sample in its loss: emulated, since two processors
that others use too give no steady ratio. Each times its micro-batches alone, through ``autotune.apply``; shares follow
of that as in ``autotune share``. Equal and unequal shares then take turns. Bound: the sum of the speeds alone over
twice the lower one. Bar: at least 0.95 of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autotune
from autotune.plan import Plan
from autotune.ranks import gathered
from autotune.search.shares import Timed, quickest, share_out
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.parallel import Parallel

from .rows import save_rows

BAR = 0.95
EFFECTIVE, MICROS = 48, (1, 2, 4, 8)
SAMPLE_S = 0.002
"""Of the faster rank."""
ROUNDS, STEPS = 3, 8


def main() -> None:
    """Run each ratio and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.5, 2.0, 3.0])
    parser.add_argument("--keep", action="store_true", help="add rows to benchmarks/results/unlike-devices-cpu.jsonl")
    arguments = parser.parse_args()
    rows = [compare(ratio) for ratio in arguments.ratios]
    for row in rows:
        verdict = "holds" if row["of_bound"] >= BAR else "SHORT"
        most = f"{row['gain']:.3f}x of at most {row['bound']:.3f}x"
        print(
            f"ratio {row['ratio']}: shares {row['shares']}, {row['even_per_s']:.0f} -> {row['shared_per_s']:.0f} "
            f"samples/s, {most}: {row['of_bound']:.3f} (bar {BAR}: {verdict})"
        )
    if arguments.keep:
        print(save_rows("unlike-devices", "cpu", rows))


def compare(ratio: float) -> dict[str, Any]:
    """Both splits on a pair of ranks, the second slower by ``ratio``; one row."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_in_each, args=(rank, ratio, folder)) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        row: dict[str, Any] = json.loads(Path(folder, "row.json").read_text())
    return row


def _in_each(rank: int, ratio: float, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = _task(SAMPLE_S * (ratio if rank else 1))
    mine = [_timed(task, micro) for micro in MICROS]
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    timed = [[Timed(*one) for one in row] for row in gathered(mine)]
    counts = share_out(timed, EFFECTIVE)
    parallel = Parallel(kind="ddp", processes=2, effective=EFFECTIVE)
    splits = {
        name: _training(task, Batch.of(own[rank], quickest(timed[rank], own[rank]).micro), parallel)
        for name, own in {"even": [EFFECTIVE // 2] * 2, "shared": counts}.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in splits}
    for _ in range(ROUNDS):
        for name, training in splits.items():
            seconds[name].append(_seconds(training))
    if rank == 0:
        even_per_s, shared_per_s = (EFFECTIVE / statistics.median(seconds[name]) for name in ("even", "shared"))
        alone = [max(one.micro / one.seconds for one in row) for row in timed]
        bound, gain = sum(alone) / (2 * min(alone)), shared_per_s / even_per_s
        row = {
            "ratio": ratio,
            "effective": EFFECTIVE,
            "alone_per_s": [round(one, 1) for one in alone],
            "shares": counts,
            "expected_s": [round(quickest(t, n).seconds_for(n), 4) for t, n in zip(timed, counts, strict=True)],
            "even_per_s": round(even_per_s, 1),
            "shared_per_s": round(shared_per_s, 1),
            "gain": round(gain, 4),
            "bound": round(bound, 4),
            "of_bound": round(gain / bound, 4),
        }
        Path(folder, "row.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def _task(sample_s: float) -> autotune.Task:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(sample_s * len(batch))
        return model(batch).square().mean()

    data = torch.randn(EFFECTIVE * STEPS, 16, generator=torch.Generator().manual_seed(0))
    return autotune.Task(
        build_model=lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)),
        build_dataset=lambda: data,
        compute_loss=loss,
        batch_size=EFFECTIVE,
    )


def _training(task: autotune.Task, batch: Batch, parallel: Parallel) -> autotune.Training:
    return autotune.apply(Plan(settings=Settings(batch=batch, parallel=parallel)), task)


def _timed(task: autotune.Task, micro: int) -> tuple[int, float]:
    """A micro-batch, and its seconds at the median of some epochs, this rank alone."""
    training = _training(task, Batch.of(EFFECTIVE, micro), Parallel())
    return micro, statistics.median(_seconds(training) for _ in range(2)) * micro / EFFECTIVE


def _seconds(training: autotune.Training) -> float:
    """Of an optimizer step, at the median of an epoch's without the first."""
    ends = []
    for batch in training.loader:
        if training.step(batch).stepped:
            ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


if __name__ == "__main__":
    main()
