"""What a training did, tensor by tensor: through ``apply``, and through a hand-written loop to hold it against."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from ..plan import Plan
from ..randomness import seed_everything
from ..task import Task
from ..techniques import Settings
from ..training.apply_plan import apply
from .zoo import once_each


@dataclass
class Run:
    """An epoch of training."""

    losses: list[Tensor] = field(default_factory=list)
    """Mean loss of each optimizer step."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """By parameter name, as the first optimizer step saw them."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers after the epoch."""

    def equals(self, other: Run) -> bool:
        """Whether every loss, gradient, parameter and buffer is bitwise the same."""
        losses = len(self.losses) == len(other.losses) and all(map(torch.equal, self.losses, other.losses))
        pairs = ((self.gradients, other.gradients), (self.state, other.state))
        return losses and all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs)


@once_each
def run_by_hand(task: Task) -> Run:
    """One epoch of a plain loop, as a user would write it without this package."""
    seed_everything(0)
    model = task.build_model()
    dataset = task.build_dataset()
    optimizer = task.make_optimizer(model)
    stream = isinstance(dataset, IterableDataset)
    sampler = None if stream else RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(dataset, task.batch_size, sampler=sampler, collate_fn=task.collate)
    run = Run()
    for batch in loader:
        loss = task.compute_loss(model, batch)
        mean = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        mean.backward()
        run.gradients = run.gradients or gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(mean.detach())
    run.state = state_of(model)
    return run


def run_applied(task: Task, settings: Settings) -> Run:
    """One epoch through ``apply``."""
    training = apply(Plan(settings=settings), task)
    run = Run()

    def note_gradients(*_: Any) -> None:
        run.gradients = run.gradients or gradients_of(training.model)

    hook = training.optimizer.register_step_pre_hook(note_gradients)
    total, weight = torch.zeros(()), 0.0
    for batch in training.loader:
        result = training.step(batch)
        total, weight = total + result.loss * result.weight, weight + result.weight
        if training.loader.batch.accumulate == 1:
            run.losses.append(result.loss)
        elif result.stepped:
            run.losses.append(total / weight)
        if result.stepped:
            total, weight = torch.zeros(()), 0.0
    hook.remove()  # it holds the training in a cycle, and with it the loader's workers
    run.state = state_of(training.model)
    return run


def loss_and_backward(task: Task, model: nn.Module, batch: Any) -> Tensor:
    """The detached loss, as the same random numbers make it; gradients are added up."""
    torch.manual_seed(0)
    loss = task.compute_loss(model, batch)
    value: Tensor = loss[0] if isinstance(loss, tuple) else loss
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def equal_gradients(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether they are bitwise the same, and tensors of their own; or neither has one."""
    if one.grad is None or other.grad is None:
        return one.grad is other.grad
    return torch.equal(one.grad.to_dense(), other.grad.to_dense()) and one.grad is not other.grad


def relative_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """L2 norm of the difference over that of ``other``, all tensors together.

    Raises:
        AssertionError: the names differ.
    """
    assert one.keys() == other.keys(), f"{one.keys() ^ other.keys()} are in one of the two only"
    difference = sum(float((one[key].double() - other[key].double()).square().sum()) for key in other)
    size = sum(float(value.double().square().sum()) for value in other.values())
    return math.sqrt(difference / (size or 1.0))


def without_dropout(task: Task) -> Task:
    """The task with every dropout rate at zero, for what draws random numbers in another order."""

    def build_model() -> nn.Module:
        model = task.build_model()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(module, nn.RNNBase):
                module.dropout = 0.0
        return model

    return replace(task, build_model=build_model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Dense copies, by parameter name, of those that there are."""
    return {name: p.grad.detach().clone().to_dense() for name, p in model.named_parameters() if p.grad is not None}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
