"""Whether splitting a batch changes the gradient, measured on one batch. The first run of the user's loss, too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import SequentialSampler

from ..loader import Loader
from ..randomness import seed_everything
from ..task import Task
from ..techniques import LoaderSpec, Settings
from ..techniques.batch import Batch
from ..training import Training
from .dropout import without_dropout
from .errors import NonFiniteLoss

__all__ = ["Split", "measure_split"]

_Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class Split:
    """What a split batch showed."""

    error: float | None
    """Relative L2 difference of the gradient; None where it could not be measured."""
    reason: str | None
    """Why it could not."""
    samples_per_s: float
    """Of the whole batch's forward and backward, the second time."""


def measure_split(task: Task, model: nn.Module, samples: Sequence[Any], device: torch.device) -> Split:
    """Compare the gradient of a batch taken whole with that of two uneven micro-batches.

    Dropout off, fp32, modes as the user set them; parameters and running statistics are left as they were. Both go
    through :class:`Training`, so that the weights are those of a job.

    Args:
        task: for its loss and its collate function.
        model: on the device, without techniques.
        samples: of the dataset, >= 1.
        device: where the model is.

    Raises:
        NonFiniteLoss: the loss of the whole batch is NaN or infinite.
        TaskError: the loss is neither a scalar nor (loss_sum, count).
        Exception: whatever the user's model and loss raise on the whole batch.
    """
    size = len(samples)
    with without_dropout(model), _buffers_kept(model):
        _gradient(task, model, samples, size, device)
        began_s = perf_counter()
        whole = _gradient(task, model, samples, size, device)
        samples_per_s = size / (perf_counter() - began_s)
        if size < 2:
            return Split(None, "one sample cannot be split", samples_per_s)
        try:
            parts = _gradient(task, model, samples, min(size - 1, -(-2 * size // 3)), device)
        except torch.OutOfMemoryError:
            raise
        except (NonFiniteLoss, RuntimeError, ValueError, IndexError) as error:
            return Split(None, f"{type(error).__name__} on part of a batch: {error}", samples_per_s)
    found = _relative_difference(whole, parts)
    return Split(found, None if found is not None else "no parameter of the optimizer gets a gradient", samples_per_s)


def _gradient(task: Task, model: nn.Module, samples: Sequence[Any], micro: int, device: torch.device) -> _Gradients:
    """What the optimizer would see, after one optimizer step over the samples that changes nothing."""
    seed_everything(0)
    parameters = [p for group in task.make_optimizer(model).param_groups for p in group["params"]]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    seen: _Gradients = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(_copy(p.grad) for p in parameters))
    spec = LoaderSpec(samples, task.collate, {}, device, user_dataset=samples)
    loader = Loader(spec, Batch.of(len(samples), micro), SequentialSampler(samples))
    training = Training(model, optimizer, loader, task.compute_loss, Settings())
    for batch in loader:
        loss = float(training.step(batch).loss)
        if not math.isfinite(loss):
            optimizer.zero_grad()
            raise NonFiniteLoss(1, loss)
    return seen


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """On the host, where room is plenty."""
    return None if gradient is None else gradient.detach().to("cpu", torch.float32, copy=True).to_dense()


def _relative_difference(whole: _Gradients, parts: _Gradients) -> float | None:
    pairs = [(a, b) for a, b in zip(whole, parts, strict=True) if a is not None and b is not None]
    norm = math.sqrt(sum(float(a.square().sum(dtype=torch.float64)) for a, _ in pairs))
    difference = math.sqrt(sum(float((a - b).square().sum(dtype=torch.float64)) for a, b in pairs))
    return difference / norm if norm else None
