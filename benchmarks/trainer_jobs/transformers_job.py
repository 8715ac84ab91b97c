"""A transformers Trainer: `python -m benchmarks.trainer_jobs.transformers_job cnn plan.yaml OUT STEPS`."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from transformers import Trainer, TrainingArguments

import autotune
from autotune.integrations.transformers import PlanMixin, arguments

from .models import ACCUMULATE, MICRO, build_dataset, build_model
from .timed import Timed

_STOCK: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "max_steps": 10**6}


class Planned(PlanMixin, Trainer):
    """As docs/use/frameworks.md has it."""


def task_of(case: str) -> autotune.Task:
    """The job without its plan."""

    def build_trainer() -> Trainer:
        given = TrainingArguments(tempfile.gettempdir(), **_STOCK, per_device_train_batch_size=MICRO[case] * ACCUMULATE)
        return Trainer(build_model(case), given, train_dataset=build_dataset(case))

    return autotune.from_trainer(build_trainer)


def main(case: str, path: str, out: str, num_steps: str) -> None:
    """Train with the plan."""
    plan = autotune.load_plan(path)
    with tempfile.TemporaryDirectory() as folder, Timed(out, int(num_steps), MICRO[case] * ACCUMULATE):
        given = TrainingArguments(folder, **_STOCK, disable_tqdm=True, **arguments(plan))
        Planned(build_model(case), given, train_dataset=build_dataset(case), plan=plan).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
