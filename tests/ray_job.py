"""A loop for Ray Train over a job of the zoo, and what it is to train as; run as a program, on a cluster."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from autotune.integrations import ray_train
from autotune.plan import Budget, Environment, Plan
from autotune.randomness import seed_everything
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.data_loading import DataLoading
from autotune.techniques.layers import Layers
from autotune.techniques.optimizers.optimizer import Optimizer
from autotune.techniques.precision import Precision
from autotune.testing.zoo import ZOO

PLAN = Plan(
    budget=Budget(device="cpu"),
    settings=Settings(
        batch=Batch(micro=4, accumulate=2),
        precision=Precision(kind="bf16"),
        layers=Layers(kind="exact"),
        checkpointing=Checkpointing(kind="blocks", every=2),
        optimizer=Optimizer(kind="fused"),
        data_loading=DataLoading(num_workers=0, cache="host"),
    ),
    environment=Environment(torch=torch.__version__, device="x", autotune="0.1.0", python="3.11", threads=2),
)


def loader(name: str) -> DataLoader:
    return DataLoader(Subset(ZOO[name].build_dataset(), range(16)), batch_size=8)


def train(name: str, accumulate: int = 2) -> dict[str, Any]:
    """An epoch: each micro-batch's loss, and what was applied."""
    task = ZOO[name]
    seed_everything(0)
    model = ray_train.prepare_model(PLAN, task.build_model())
    optimizer = ray_train.prepare_optimizer(PLAN, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for number, batch in enumerate(ray_train.prepare_data_loader(PLAN, loader(name)), 1):
        with ray_train.forward_context(PLAN):
            loss = task.compute_loss(model, batch)
            autocast = torch.is_autocast_enabled("cpu")
        losses.append(loss.item())
        (loss / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "autocast": autocast,
        "samples": len(batch[0]),
        "fused": optimizer.param_groups[0]["fused"],
        "recomputed": sum("forward" in vars(module) for module in model.modules()),
        "threads": torch.get_num_threads(),
        "variable": os.environ.get("OMP_NUM_THREADS"),
    }


def main(address: str, folder: str, name: str) -> None:
    """Train in a worker of a cluster, which writes what ``train`` says: Ray keeps metrics with checkpoints alone."""
    import ray
    from ray.train.torch import TorchTrainer

    paths = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *filter(None, sys.path)])
    ray.init(address=address, runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False)
    trainer = TorchTrainer(
        lambda: Path(folder, "seen.json").write_text(json.dumps(train(name))),
        scaling_config=ray_train.scaling_config(PLAN, resources_per_worker={"CPU": 0.01}),
        run_config=ray_train.run_config(PLAN, storage_path=folder),
    )
    trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
