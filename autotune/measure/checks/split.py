"""Measures on one batch whether splitting it changes the gradient. It is also the first run of the user's loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import SequentialSampler

from ...data.loader import Loader
from ...randomness import seed_everything
from ...task import Task
from ...techniques import LoaderSpec, Settings
from ...techniques.batch import Batch
from ...techniques.support.comparable import state_kept, without_dropout
from ...techniques.support.tf32 import without_tf32
from ...training.out_of_memory import is_out_of_memory
from ...training.training import Training
from ..errors import NonFiniteLoss
from .hooks import check_hooks

_Gradients = list[torch.Tensor | None]
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Split:
    """The result for one batch."""

    error: float | None
    """Relative L2 difference of the gradient; None where it could not be measured."""
    reason: str | None
    """Why it could not."""
    samples_per_s: float
    """Speed of forward and backward over the whole batch, at the second run."""
    own_autocast: bool = False
    """Whether the model or its loss turns autocast on by itself."""
    rounded: bool = False
    """Whether the difference was computed in half precision."""


def measure_split(task: Task, model: nn.Module, samples: Sequence[Any], device: torch.device) -> Split:
    """Compare the gradient of a batch taken whole with that of two uneven micro-batches.

    Dropout off, fp32 without TF32 (cuDNN may take another kernel for another batch, which in TF32 rounds by more than a
    split may differ), modes as the user set them; parameters and running statistics are left as they were. Both go
    through :class:`Training`, so that the weights are those of a job. An autocast of the model's own is kept off for
    the comparison, where the model runs without: rounding, 0.2 % of the gradient in bf16, is no difference of a split.

    Args:
        task: for its loss and its collate function.
        model: on the device, without techniques.
        samples: of the dataset, >= 1.
        device: where the model is.

    Raises:
        NonFiniteLoss: the loss of the whole batch is NaN or infinite.
        TaskError: the loss is neither a scalar nor (loss_sum, count), or torch cannot call a hook of the optimizer.
        Exception: whatever the user's model and loss raise on the whole batch.
    """
    size, task = len(samples), replace(task, max_grad_norm=None, after_backward=None, after_step=None)
    run = partial(_gradient, task, model, samples, device)
    with without_dropout(model), state_kept(model):
        with without_tf32(), autocast_seen(device.type) as seen:
            whole = run(size, checks_hooks=True)
        began_s = perf_counter()
        run(size)
        known = Split(None, None, size / (perf_counter() - began_s), seen.turned_on)
        if size < 2:
            return replace(known, reason="one sample cannot be split")
        off = _without_autocast(run, size, device, whole) if seen.turned_on else None
        try:
            with without_tf32(), _autocast_kept_off(device.type) if off is not None else nullcontext():
                parts = run(min(size - 1, -(-2 * size // 3)))
        except (NonFiniteLoss, RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            return replace(known, reason=f"{type(error).__name__} on part of a batch: {error}")
    found = _relative_difference(whole if off is None else off, parts)
    if found is None:
        return replace(known, reason="no parameter of the optimizer gets a gradient")
    is_half = any(p.dtype in _HALF for p in model.parameters())
    return replace(known, error=found, rounded=is_half or (seen.turned_on and off is None))


def _without_autocast(
    run: Callable[[int], _Gradients], size: int, device: torch.device, under_autocast: _Gradients
) -> _Gradients | None:
    """The whole batch's gradient in fp32; None where the model's own types need autocast, or autocast is compiled
    in."""
    try:
        with without_tf32(), _autocast_kept_off(device.type):
            found = run(size)
    except (NonFiniteLoss, RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return None
    return found if _relative_difference(under_autocast, found) else None


def _gradient(
    task: Task, model: nn.Module, samples: Sequence[Any], device: torch.device, micro: int, checks_hooks: bool = False
) -> _Gradients:
    """The gradient that the optimizer would see, after one optimizer step over the samples that changes nothing."""
    seed_everything(0)
    users = task.make_optimizer(model)
    parameters = [p for group in users.param_groups for p in group["params"]]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    seen: _Gradients = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(_copy(p.grad) for p in parameters))
    if checks_hooks:
        optimizer.register_step_pre_hook(lambda *_: check_hooks(users, task.source))
    spec = LoaderSpec(samples, task.collate, {}, device, user_dataset=samples)
    loader = Loader(spec, Batch.of(len(samples), micro), SequentialSampler(samples))
    training = Training(model, optimizer, loader, task, Settings())
    for batch in loader:
        loss = float(training.step(batch).loss)
        if not math.isfinite(loss):
            optimizer.zero_grad()
            raise NonFiniteLoss(1, loss)
    return seen


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A copy on the host, which has more memory."""
    return None if gradient is None else gradient.detach().to("cpu", torch.float32, copy=True).to_dense()


def _relative_difference(whole: _Gradients, parts: _Gradients) -> float | None:
    pairs = [(a, b) for a, b in zip(whole, parts, strict=True) if a is not None and b is not None]
    norm = math.sqrt(sum(float(a.square().sum(dtype=torch.float64)) for a, _ in pairs))
    difference = math.sqrt(sum(float((a - b).square().sum(dtype=torch.float64)) for a, b in pairs))
    return difference / norm if norm else None


@dataclass
class _AutocastSeen:
    """What was noticed so far."""

    turned_on: bool = False


@contextmanager
def autocast_seen(device_type: str) -> Iterator[_AutocastSeen]:
    """Within the block, notice whether autocast is turned on for this type of device."""
    seen = _AutocastSeen()

    def note(enabled: bool) -> bool:
        seen.turned_on = seen.turned_on or enabled
        return enabled

    with _intercepted(device_type, note):
        yield seen


@contextmanager
def _autocast_kept_off(device_type: str) -> Iterator[None]:
    """Within the block, turning autocast on for this type of device leaves it off."""
    with _intercepted(device_type, lambda enabled: False):
        yield


@contextmanager
def _intercepted(device_type: str, decide: Callable[[bool], bool]) -> Iterator[None]:
    """``torch.autocast`` as a block or a decorator, its older names, and whoever builds on them (accelerate,
    transformers, lightning) all end in ``torch.set_autocast_enabled``, which is replaced for the whole process.

    Source: torch/amp/autocast_mode.py, autocast.__enter__
    """
    real = torch.set_autocast_enabled

    def set_autocast_enabled(*args: Any) -> None:
        *kind, enabled = args
        named = str(kind[0]) if kind else "cuda"  # where the type of device is left out, it is this
        real(named, decide(enabled) if named == device_type else enabled)

    setattr(torch, real.__name__, set_autocast_enabled)
    try:
        yield
    finally:
        setattr(torch, real.__name__, real)
