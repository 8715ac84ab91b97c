"""Makes the reference keep what a plain loop keeps and ``Training.step`` does not: the last loss with its graph."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ..task import Task


def as_in_a_plain_loop(task: Task) -> Task:
    """The task with each loss kept until the next one exists, as ``loss = compute_loss(model, batch)`` keeps it.

    The loss keeps the nodes of its graph, thousands of small objects, while the next forward makes its own. On glibc
    they lie in the holes that tensors have left, and keep those from merging: a transformers GPT-2 takes 13 % more
    (``python -m benchmarks.honesty --reference``). ``Training.step`` frees them.
    """
    return dataclasses.replace(task, compute_loss=_Keeping(task.compute_loss))


class _Keeping:
    def __init__(self, compute_loss: Any) -> None:
        self._compute_loss = compute_loss
        self._loss: Any = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self._loss = self._compute_loss(model, batch)
        return self._loss
