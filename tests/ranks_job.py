"""An epoch of the small CNN in Accelerate, and one in a Trainer, in each of torchrun's processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from conformance import plan_of, watched
from integration_models import LEARNING_RATE, Numbered, adamw, build_cnn, mean_loss

PLAN = plan_of(
    batch={"micro": 2, "accumulate": 6},
    layers={"kind": "exact"},
    checkpointing={"kind": "blocks", "every": 2},
    parallel={"kind": "ddp", "processes": 2},
)


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    return mean_loss(model, {name: value for name, value in batch.items() if name != "index"})


def accelerate_job() -> tuple[Any, Any]:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from autotune.integrations.accelerate import arguments, prepare

    accelerator, model = Accelerator(cpu=True, **arguments(PLAN)), build_cnn()
    loader = DataLoader(Numbered(), batch_size=4)
    three = prepare(PLAN, accelerator, model, adamw(model.parameters()), loader, loss=loss_of)
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


def trainer_job() -> tuple[Any, Any]:
    from transformers import Trainer, TrainingArguments

    from autotune.integrations.transformers import PlanMixin, arguments

    class Planned(PlanMixin, Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            drawn.extend(inputs["index"].tolist())
            return loss_of(model, inputs)

    drawn: list[int] = []
    stock = {"use_cpu": True, "report_to": [], "num_train_epochs": 1, "max_grad_norm": 0, "save_strategy": "no"}
    stock |= {"lr_scheduler_type": "constant", "learning_rate": LEARNING_RATE, "disable_tqdm": True}
    stock |= {"optim": "adamw_torch", "train_sampling_strategy": "sequential", "remove_unused_columns": False}
    given = TrainingArguments(os.environ["OUT"] + "-trainer", **stock, **arguments(PLAN))
    trainer = Planned(build_cnn(), given, train_dataset=Numbered(), plan=PLAN)
    trainer.create_optimizer()  # looks at two samples
    drawn.clear()

    def train(seen: list[int]) -> str:
        trainer.train()
        seen += drawn
        return type(trainer.model_wrapped).__name__

    return trainer.model, train


def main() -> None:
    said: dict[str, Any] = {}
    for framework, build in (("accelerate", accelerate_job), ("trainer", trainer_job)):
        model, train = build()
        samples: list[int] = []
        with watched(model, "cnn") as seen:
            wrapper = train(samples)
        weights = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
        said[framework] = {"samples": samples, "steps": seen.steps, "weights": weights, "wrapper": wrapper}
    Path(os.environ["OUT"], os.environ["RANK"]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
