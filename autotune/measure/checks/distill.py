"""Distillation in recovery: what is left of a model learns from the untouched one's outputs, beside the task's loss.

Source: Hinton, Vinyals, Dean 2015, arXiv:1503.02531.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import TaskError
from ...randomness import undisturbed
from ...task import Task
from ...training.apply_plan import build_model
from ...training.training import Training

_TEMPERATURE = 2.0
"""Logits are divided by it, the teacher's and the student's."""
_SHARE = 0.5
"""Of the soft targets in the loss; the rest is the task's own."""


def build_teacher(task: Task) -> nn.Module:
    """The untouched model, with the task's weights, in eval mode.

    Raises:
        TaskError: the task names no weights: as it is built, the model has nothing to teach.
    """
    if task.weights is None:
        raise TaskError(
            f"{task.source or 'task'}: --distill needs a model that has been trained. Name its weights in the task "
            '(weights = "model.pt"), or leave --distill out.'
        )
    return build_model(task).eval()


def distilled(training: Training, task: Task, teacher: nn.Module) -> Training:
    """The same training with soft targets in its loss: the teacher's outputs as probabilities over the last dimension.

    Every row of the outputs counts alike, those that the task's own loss may leave out too.

    Args:
        training: fresh from :func:`autotune.apply`.
        task: what it was built from.
        teacher: of :func:`build_teacher`; it goes to the training's device.
    """
    taught = replace(task, compute_loss=_with_soft_targets(task, teacher.to(training.device)))
    other = Training(training.model, training.optimizer, training.loader, taught, training.settings)
    other.evaluation_batch = training.evaluation_batch
    return other


def _with_soft_targets(task: Task, teacher: nn.Module) -> Callable[[nn.Module, Any], Any]:
    where = task.source or "task"

    def compute_loss(model: nn.Module, batch: Any) -> Any:
        with undisturbed(), torch.no_grad(), _outputs(teacher, where) as known:
            task.compute_loss(teacher, batch)
        with _outputs(model, where) as said:
            own = task.compute_loss(model, batch)
        soft = _soft_loss(said[-1], known[-1], where)
        if isinstance(own, tuple):
            return (1 - _SHARE) * own[0] + _SHARE * soft * own[1], own[1]
        return (1 - _SHARE) * own + _SHARE * soft

    return compute_loss


def _soft_loss(said: Tensor, known: Tensor, where: str) -> Tensor:
    """Mean over rows of the Kullback-Leibler divergence, times the temperature squared, as the paper has it."""
    if said.shape != known.shape:
        raise TaskError(
            f"{where}: --distill compares outputs, but the model returns {tuple(said.shape)} and the untouched one "
            f"{tuple(known.shape)}. Leave --distill out."
        )
    student, teacher = (F.log_softmax(one.flatten(0, -2).float() / _TEMPERATURE, -1) for one in (said, known))
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean") * _TEMPERATURE**2


@contextmanager
def _outputs(model: nn.Module, where: str) -> Iterator[list[Tensor]]:
    """What the model returns within the body: logits, or something that has them.

    Raises:
        TaskError: the loss does not call it, or it returns something else.
    """
    found: list[Tensor] = []

    def take(module: nn.Module, inputs: Any, returned: Any) -> None:
        logits = getattr(returned, "logits", returned)
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() < 2:
            raise TaskError(
                f"{where}: --distill needs a model that returns logits, (..., classes), or something with .logits, but "
                f"it returned {type(returned).__name__}. Leave --distill out."
            )
        found.append(logits)

    handle = model.register_forward_hook(take)
    try:
        yield found
    finally:
        handle.remove()
    if not found:
        raise TaskError(f"{where}: --distill needs compute_loss to call the model that it is given. Leave it out.")
