"""What each rule of kernels' own memory adds to the tensors' peak of the replay's configurations.

    python -m benchmarks.kernel_rules --table digits_cnn

A row for each configuration: the peak of a traced step, and what it is without one rule, or without any.
`benchmarks.ablation` replays searches that are told the latter.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from autotune import Plan, Task, load_task
from autotune.estimates.tracing.fake_step import FakeTraining, TracedStep
from autotune.plan import Budget
from autotune.techniques import Settings

from .replay.gains import TABLES
from .replay.problem import micro_batch
from .replay.table import load_table
from .rows import EXAMPLES, HERE, save_rows

ALL = "all"
"""In place of a rule's name."""


def main() -> None:
    """Trace, print how much each rule is of a peak, keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = tuple(path.stem for path in TABLES)
    parser.add_argument("--table", choices=names, action="append", help="may be given again; default: all")
    arguments = parser.parse_args()
    for path in TABLES:
        if path.stem in (arguments.table or names):
            every = {traced_as(entry.settings) for entry in load_table(path).entries}
            rows = [{"table": path.stem, **row} for row in _rows(_task(path.stem), every)]
            for rule in sorted({rule for row in rows for rule in row["without_bytes"]}):
                shares = [1 - row["without_bytes"].get(rule, row["peak_bytes"]) / row["peak_bytes"] for row in rows]
                mean, most = statistics.fmean(shares), max(shares)
                print(f"{path.stem:14}{rule:30} {mean:6.1%} of a peak on average, {most:6.1%} at most")
            save_rows("kernel-rules", "cpu", rows)


def traced_as(settings: Settings) -> Settings:
    """What a step's tensors depend on."""
    return settings.stock("process", "loader", "update")


def _task(name: str) -> Task:
    own = HERE / "replay" / "tasks" / f"{name}.py"
    return load_task(str(own if own.exists() else EXAMPLES / name / "model.py"))


def _rows(task: Task, every: Collection[Settings]) -> Iterator[dict[str, Any]]:
    combinations: dict[Settings, list[Settings]] = {}
    for settings in every:
        combinations.setdefault(settings.model_copy(update={"batch": None}), []).append(settings)
    for combination, members in combinations.items():
        fake_training = FakeTraining(Plan(settings=combination, budget=Budget(device="cpu")), task)
        for settings in members:
            step = fake_training.step(micro_batch(settings))
            rules = {kernel.scratch.__name__ for kernel in step.kernels}
            without = {rule: _peak_without(step, {rule}) for rule in sorted(rules)}
            yield {
                "settings": settings.model_dump(mode="json", exclude_defaults=True),
                "peak_bytes": step.trace.peak_bytes(),
                "without_bytes": {**without, ALL: _peak_without(step, rules)},
            }


def _peak_without(step: TracedStep, rules: Collection[str]) -> int:
    scratch = (one.id for one in step.trace.allocations if one.is_scratch)
    gone = {number for number, kernel in zip(scratch, step.kernels, strict=True) if kernel.scratch.__name__ in rules}
    left = tuple(replace(one, num_bytes=0) if one.id in gone else one for one in step.trace.allocations)
    return replace(step.trace, allocations=left).peak_bytes()


if __name__ == "__main__":
    main()
