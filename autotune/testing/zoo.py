"""The zoo: small seeded training jobs that every technique must leave right, each a few milliseconds a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from ..task import Task
from .models import Gpt, InputImage, Lstm, Mlp, ResNet, Tied, cnn

T = TypeVar("T")

NUM_SAMPLES = 22
"""Samples in each dataset: two whole batches and a tail of 6."""
BATCH_SIZE = 8
"""The effective batch of each task."""


def _vectors() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def _images() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator)
    return TensorDataset(x, x.mean((2, 3)).argmax(1))


def _tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 11, (NUM_SAMPLES, 9), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _sequences() -> TensorDataset:
    inputs, targets = _tokens().tensors
    return TensorDataset(inputs, targets[:, -1] % 3)


def _sentences() -> list[Tensor]:
    """Token ids of lengths 2 to 8."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(1, 11, (2 + index % 7,), generator=generator) for index in range(NUM_SAMPLES)]


class VectorStream(IterableDataset[tuple[Tensor, Tensor]]):
    """The MLP's data as a stream of unknown length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(_vectors())


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def _predict_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def _sum_over_tokens(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """(loss_sum, count) over the tokens that are no padding."""
    x, y = batch[:, :-1], batch[:, 1:]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0, reduction="sum")
    return loss, (y != 0).sum()


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Linear in the gradient: AdamW blows up the rounding of gradients that are zero but for rounding."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _frozen_mlp() -> nn.Module:
    model = Mlp()
    model.stem.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    return model


def _partly_eval() -> nn.Module:
    model = ResNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def _optimize_image(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([model.image], lr=0.1)


def _task(model: Callable[[], nn.Module], dataset: Callable[[], Any], loss: Any = _classify, **rest: Any) -> Task:
    return Task(model, dataset, loss, batch_size=BATCH_SIZE, **rest)


ZOO: dict[str, Task] = {
    "mlp": _task(Mlp, _vectors, variants={"narrow": partial(Mlp, width=8)}),
    "cnn": _task(cnn, _images, build_optimizer=_sgd),
    "resnet": _task(ResNet, _images, build_optimizer=_sgd),
    "gpt": _task(Gpt, _tokens, _predict_tokens, build_optimizer=_sgd),
    "lstm": _task(Lstm, _sequences, build_optimizer=_sgd),
    "tied": _task(Tied, _tokens, _predict_tokens, build_optimizer=_sgd),
    "frozen": _task(_frozen_mlp, _vectors),
    "partly_eval": _task(_partly_eval, _images, build_optimizer=_sgd),
    "token_loss": _task(Gpt, _sentences, _sum_over_tokens, collate=_pad, build_optimizer=_sgd),
    "stream": _task(Mlp, VectorStream),
    "input": _task(InputImage, _images, build_optimizer=_optimize_image),
}
"""MLP, CNN with BatchNorm, ResNet-like, GPT-like with dropout, LSTM, shared weights, frozen parameters, BatchNorm left
in eval mode, a loss summed over varying counts, an iterable dataset, and one that optimizes its input."""


def once_each(told: Callable[[Task], T]) -> Callable[[Task], T]:
    """What a function says of a task, said once for each of the zoo's: dozens of tests ask. Nobody may change it."""
    known: dict[str, T] = {}

    @wraps(told)
    def tell(task: Task) -> T:
        name = next((name for name, one in ZOO.items() if one is task), None)
        if name is None:
            return told(task)
        if name not in known:
            known[name] = told(task)
        return known[name]

    return tell
