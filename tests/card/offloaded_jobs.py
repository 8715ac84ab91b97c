"""What tests of offload on a card share: work that takes a card time, and trainings beside those without."""

from __future__ import annotations

from typing import Any

import torch
from stand_in import Card

from autotune.plan import Plan
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.offload import Offload
from autotune.training.apply_plan import apply


class Computes(torch.autograd.Function):
    """Takes a card so many seconds in forward, and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, card: Card | None, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.card, ctx.backward_s = card, backward_s
        if card is not None:
            card.work(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.card is not None:
            ctx.card.work(ctx.backward_s)
        return grad, None, None, None


def trains_as_without(setting: Offload, task: Task, others: dict[str, Any]) -> bool:
    """Whether all losses of an epoch, and the parameters after it, are bit for bit those without offload."""
    losses, parameters = [], []
    for one in (Offload(), setting):
        training = apply(Plan(settings=Settings(offload=one, **others)), task)
        losses.append([training.step(batch).loss.item() for batch in training.loader])
        parameters.append([one.detach().clone() for one in training.model.parameters()])
    return losses[0] == losses[1] and all(map(torch.equal, *parameters))
