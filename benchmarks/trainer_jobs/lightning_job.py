"""A Lightning module: `python -m benchmarks.trainer_jobs.lightning_job cnn plan.yaml OUT STEPS`."""

from __future__ import annotations

import functools
import sys
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import autotune
from autotune.integrations.lightning import PlanCallback, trainer_arguments

from .models import ACCUMULATE, MICRO, build_dataset, build_model, build_optimizer
from .timed import Timed

_QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Module(pl.LightningModule):
    """The case's model."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.net = build_model(case)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The model's own loss."""
        loss: torch.Tensor = self.net(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As everywhere."""
        return build_optimizer(self.parameters())


def task_of(case: str) -> autotune.Task:
    """The job without its plan."""
    whole = MICRO[case] * ACCUMULATE
    return autotune.from_lightning(
        functools.partial(Module, case),
        lambda: DataLoader(build_dataset(case), batch_size=whole, shuffle=True),
    )


def main(case: str, path: str, out: str, num_steps: str) -> None:
    """Train with the plan."""
    plan = autotune.load_plan(path)
    with tempfile.TemporaryDirectory() as folder, Timed(out, int(num_steps), MICRO[case] * ACCUMULATE):
        trainer = pl.Trainer(
            callbacks=[PlanCallback(plan)],
            default_root_dir=folder,
            accelerator="cpu",
            max_epochs=1,
            **_QUIET,
            **trainer_arguments(plan),
        )
        trainer.fit(Module(case), DataLoader(build_dataset(case), batch_size=MICRO[case], shuffle=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
