"""``Inference``: a task's ``infer`` with a plan applied. ``infer(batch)`` is all of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import torch

from ...errors import TaskError
from ..training import StepResult, Training


class Inference(Training):
    """A model in eval mode and its loader, with every technique of a plan for inference applied.

    Built by :func:`autotune.apply` of a plan that ``autotune search --inference`` wrote. ``loader`` yields the task's
    samples in their order, in batches of the plan's size, on the device.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As :class:`Training` is."""
        super().__init__(*args, **options)
        self.latencies_s: list[float] = []
        """Of each :meth:`step`: seconds from a batch on the device to its outputs there."""
        self._nothing = torch.zeros((), device=self.device)

    def infer(self, batch: Any) -> Any:
        """The outputs of the task's ``infer``, without gradients.

        Args:
            batch: on the device, as ``loader`` yields it.

        Raises:
            Exception: whatever the task's ``infer`` raises.
        """
        self.loader.positions.take(batch)
        with torch.inference_mode(), self.settings.forward_context(self.device.type):
            return self._compute_loss(self.model, batch)

    def step(self, batch: Any) -> StepResult:
        """:meth:`infer`, timed, its outputs dropped: what a trial does.

        Returns:
            A loss of 0, over the batch.
        """
        began_s = perf_counter()
        self.infer(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.latencies_s.append(perf_counter() - began_s)
        return StepResult(self._nothing, True, 1)

    def forward_context(self) -> AbstractContextManager[Any]:
        """
        Raises:
            TaskError: there is no loss that a loop of one's own could pass back.
        """
        raise _no_training("forward_context")

    def backward(self, loss: Any, batch: Any = None) -> bool:
        """
        Raises:
            TaskError: the plan is for inference.
        """
        raise _no_training("backward")

    def optimizer_step(self) -> bool:
        """
        Raises:
            TaskError: the plan is for inference.
        """
        raise _no_training(self.optimizer_step.__name__)


def _no_training(name: str) -> TaskError:
    return TaskError(f"{name}: the plan is for inference, which trains nothing. Call infer(batch).")
