"""An epoch of the small CNN in Accelerate, and one in a Trainer, in each of two processes as torchrun starts them."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from conformance import plan_of, watched
from gloo_pair import fork_a_pair
from integration_models import LEARNING_RATE, Numbered, adamw, build_cnn, mean_loss
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from autotune.integrations import accelerate as planned_accelerate
from autotune.integrations import transformers as planned_trainer

PLAN = plan_of(
    batch={"micro": 2, "accumulate": 6},
    layers={"kind": "exact"},
    checkpointing={"kind": "blocks", "every": 2},
    parallel={"kind": "ddp", "processes": 2},
)


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    return mean_loss(model, {name: value for name, value in batch.items() if name != "index"})


def accelerate_job() -> tuple[Any, Any]:
    accelerator, model = Accelerator(cpu=True, **planned_accelerate.arguments(PLAN)), build_cnn()
    loader = DataLoader(Numbered(), batch_size=4)
    three = planned_accelerate.prepare(PLAN, accelerator, model, adamw(model.parameters()), loader, loss=loss_of)
    wrapped, optimizer, loader = accelerator.prepare(*three)

    def train(drawn: list[int]) -> str:
        for batch in loader:
            drawn += batch["index"].tolist()
            with accelerator.accumulate(wrapped):
                accelerator.backward(loss_of(wrapped, batch))
                optimizer.step()
                optimizer.zero_grad()
        return type(wrapped).__name__

    return model, train


def trainer_job(folder: str) -> tuple[Any, Any]:
    class Planned(planned_trainer.PlanMixin, Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            drawn.extend(inputs["index"].tolist())
            return loss_of(model, inputs)

    drawn: list[int] = []
    stock = {"use_cpu": True, "report_to": [], "num_train_epochs": 1, "max_grad_norm": 0, "save_strategy": "no"}
    stock |= {"lr_scheduler_type": "constant", "learning_rate": LEARNING_RATE, "disable_tqdm": True}
    stock |= {"optim": "adamw_torch", "train_sampling_strategy": "sequential", "remove_unused_columns": False}
    given = TrainingArguments(folder, **stock, **planned_trainer.arguments(PLAN))
    trainer = Planned(build_cnn(), given, train_dataset=Numbered(), plan=PLAN)
    trainer.create_optimizer()  # looks at two samples
    drawn.clear()

    def train(seen: list[int]) -> str:
        trainer.train()
        seen += drawn
        return type(trainer.model_wrapped).__name__

    return trainer.model, train


def main(folder: str) -> None:
    said: dict[str, Any] = {}
    for framework, build in (("accelerate", accelerate_job), ("trainer", lambda: trainer_job(folder))):
        model, train = build()
        samples: list[int] = []
        with watched(model, "cnn") as seen:
            wrapper = train(samples)
        weights = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
        said[framework] = {"samples": samples, "steps": seen.steps, "weights": weights, "wrapper": wrapper}
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(said))


def in_each(rank: int, folder: str) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    torch.set_num_threads(1)
    main(folder)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])})
    sys.exit(fork_a_pair(in_each, sys.argv[1]))
