"""A model of one weight, so that gradients are worked out by hand: loss = weight * mean of the samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, SequentialSampler

import autotune
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.training.training import Training


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Stream(IterableDataset[Any]):
    """Samples as a stream; with ``shards`` each worker reads its own."""

    def __init__(self, samples: Sequence[Any], shards: bool = False) -> None:
        self.samples, self.shards = samples, shards

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        step = worker.num_workers if worker and self.shards else 1
        return iter(self.samples[worker.id if worker and self.shards else 0 :: step])


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def line(samples: Any, **pieces: Any) -> autotune.Task:
    """The samples in their order, SGD with a learning rate of 1."""
    optional = {
        "build_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        "build_sampler": None if isinstance(samples, IterableDataset) else SequentialSampler,
        "compute_loss": mean_loss,
    }
    return autotune.Task(build_model=Line, build_dataset=lambda: samples, **{**optional, **pieces})


def floats(count: int) -> list[Tensor]:
    return [torch.tensor(float(value)) for value in range(count)]


def training_of(task: autotune.Task, **settings: Any) -> Training:
    return autotune.apply(Plan(settings=Settings(**settings)), task)


def step_gradients(training: Training) -> list[float]:
    """The weight's gradient as each optimizer step of one epoch saw it."""
    seen: list[float] = []
    hook = training.optimizer.register_step_pre_hook(lambda *_: seen.append(training.model.weight.grad.item()))
    for batch in training.loader:
        training.step(batch)
    hook.remove()
    return seen
