"""A Ray Train loop: `python -m benchmarks.trainer_jobs.ray_train_job cnn plan.yaml OUT STEPS`."""

from __future__ import annotations

import os
import sys
import tempfile

import ray.train.torch
from torch.utils.data import DataLoader

import autotune
from autotune.integrations import ray_train

from .models import ACCUMULATE, MICRO, build_dataset, build_model, build_optimizer, task_of
from .timed import Timed

__all__ = ["main", "task_of"]


def train(case: str, path: str, out: str, num_steps: int) -> None:
    """What a worker runs."""
    plan = autotune.load_plan(path)
    model = ray_train.prepare_model(plan, build_model(case).train())
    optimizer = ray_train.prepare_optimizer(plan, model, build_optimizer(model.parameters()))
    stock = DataLoader(build_dataset(case), batch_size=MICRO[case], shuffle=True)
    loader = ray_train.prepare_data_loader(plan, stock)
    with Timed(out, num_steps, MICRO[case] * ACCUMULATE):
        for number, batch in enumerate(loader, 1):
            with ray_train.forward_context(plan):
                loss = model(**batch)["loss"]
            (loss / ACCUMULATE).backward()
            if number % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()


def main(case: str, path: str, out: str, num_steps: str) -> None:
    """Train with the plan, in a worker of a cluster on this machine."""
    plan = autotune.load_plan(path)
    paths = os.pathsep.join(filter(None, sys.path))
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            lambda: train(case, os.path.abspath(path), os.path.abspath(out), int(num_steps)),
            scaling_config=ray_train.scaling_config(plan),
            run_config=ray_train.run_config(plan, storage_path=folder),
        )
        trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
