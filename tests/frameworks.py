"""One small job in each framework, without and with a plan; what its model is given is noted from outside."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autotune.plan import Plan

EPOCHS = 3


class Data(Dataset):
    """Samples that say their number, and the epoch that they are read in."""

    def __init__(self, length: int, draws: bool = False) -> None:
        self.length, self.draws, self.epoch, self.transform = length, draws, 0, None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.full((4,), float(index + 100 * self.epoch))
        if self.draws:
            x += torch.rand(1)
        return {"x": x if self.transform is None else self.transform(x)}


class Told(Data):
    """By its own method, which Accelerate and the Trainer call too."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Model(nn.Module):
    """Notes what it is given: to train on, and to be validated on."""

    def __init__(self, read: list[Any], validated: list[Any]) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self._noted = read, validated

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self._noted[not self.training].append(x[:, 0].tolist())
        outputs = self.net(x)
        return {"loss": outputs.square().mean(), "logits": outputs}


class Job(NamedTuple):
    """What a framework trains on. ``before`` is called with the training loader as each epoch begins."""

    data: Any
    held_out: Any
    before: Callable[[Any, int], None] = lambda loader, epoch: None


class Noted(NamedTuple):
    """Samples, batch by batch."""

    read: list[list[float]]
    validated: list[list[float]]


def trained(framework: str, job: Job, plan: Plan | None) -> Noted:
    """Three epochs of a job, validated after each, without a plan or with one."""
    noted = Noted([], [])
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        _TRAIN[framework](job, plan, Model(*noted), folder)
    return noted


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def trainer_of(job: Job, plan: Plan | None, model: nn.Module, folder: str, **changes: Any) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from autotune.integrations.transformers import PlanMixin, arguments

    class Planned(PlanMixin, Trainer):
        pass

    class Before(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
            job.before(train_dataloader, round(state.epoch))

    given = {
        "use_cpu": True, "report_to": [], "num_train_epochs": EPOCHS, "save_strategy": "no", "disable_tqdm": True,
        "learning_rate": 0.0, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "eval_strategy": "epoch" if job.held_out is not None else "no", "prediction_loss_only": True,
    }  # fmt: skip
    args = TrainingArguments(folder, **{**given, **(arguments(plan) if plan else {}), **changes})
    made = {"train_dataset": job.data, "eval_dataset": job.held_out, "callbacks": [Before()]}
    return Planned(model, args, plan=plan, **made) if plan else Trainer(model, args, **made)


def _by_trainer(job: Job, plan: Plan | None, model: nn.Module, folder: str) -> None:
    trainer_of(job, plan, model, folder).train()


def _by_accelerate(job: Job, plan: Plan | None, model: nn.Module, folder: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from autotune.integrations.accelerate import arguments, prepare

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, **(arguments(plan) if plan else {}))
    three = model, sgd(model), DataLoader(job.data, 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(*(prepare(plan, accelerator, *three) if plan else three))
    held_out = accelerator.prepare(DataLoader(job.held_out, 4)) if job.held_out is not None else ()
    for epoch in range(EPOCHS):
        job.before(loader, epoch)
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        for batch in held_out:
            with torch.no_grad():
                model(**batch)


def lightning_module(job: Job, model: nn.Module) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def on_train_epoch_start(self) -> None:
            job.before(self.trainer.train_dataloader, self.current_epoch)

        def training_step(self, batch: Any) -> Any:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    return Module()


def lightning_trainer(plan: Plan | None, folder: str, **changes: Any) -> Any:
    import lightning.pytorch as pl

    from autotune.integrations.lightning import PlanCallback, trainer_arguments

    given = {
        "max_epochs": EPOCHS, "accelerator": "cpu", "default_root_dir": folder, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }  # fmt: skip
    callbacks = [PlanCallback(plan)] if plan else []
    return pl.Trainer(callbacks=callbacks, **{**given, **(trainer_arguments(plan) if plan else {}), **changes})


def _by_lightning(job: Job, plan: Plan | None, model: nn.Module, folder: str) -> None:
    held_out = DataLoader(job.held_out, 4) if job.held_out is not None else None
    loaders = DataLoader(job.data, 4, shuffle=True), held_out
    lightning_trainer(plan, folder).fit(lightning_module(job, model), *loaders)


def _by_ray(job: Job, plan: Plan | None, model: nn.Module, folder: str) -> None:
    """In Ray's local mode."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train import torch as stock
    from ray.train.torch import TorchTrainer

    from autotune.integrations import ray_train

    def train() -> None:
        own = DataLoader(job.data, 4, shuffle=True)
        prepared = ray_train.prepare_model(plan, model) if plan else stock.prepare_model(model)
        optimizer = ray_train.prepare_optimizer(plan, prepared, sgd(prepared)) if plan else sgd(prepared)
        loader = ray_train.prepare_data_loader(plan, own) if plan else stock.prepare_data_loader(own)
        held_out = stock.prepare_data_loader(DataLoader(job.held_out, 4)) if job.held_out is not None else ()
        for epoch in range(EPOCHS):
            job.before(loader, epoch)
            prepared.train()
            for batch in loader:
                prepared(**batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            prepared.eval()
            for batch in held_out:
                with torch.no_grad():
                    prepared(**batch)

    config = RunConfig(storage_path=os.path.abspath(folder))
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=0), run_config=config).fit()


_TRAIN = {"transformers": _by_trainer, "accelerate": _by_accelerate, "lightning": _by_lightning, "ray": _by_ray}
FRAMEWORKS = tuple(_TRAIN)


def epochs_of(batches: list[list[float]]) -> list[list[float]]:
    """What was read in each epoch, sorted."""
    count = len(batches) // EPOCHS
    return [sorted(itertools.chain(*batches[k * count : (k + 1) * count])) for k in range(EPOCHS)]
