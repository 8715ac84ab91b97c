"""``Guard``: raises if a loop does something between micro-batches that would silently change the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TaskError


class _Seen(NamedTuple):
    """A parameter's gradient after a backward pass."""

    parameter: Tensor
    gradient: int
    """Identity of the tensor; a reference would keep it alive."""
    version: int
    """How often it was changed in place."""

    @property
    def is_unchanged(self) -> bool:
        found = self.parameter.grad
        return found is not None and id(found) == self.gradient and found._version == self.version


def _first_seen(parameters: Iterator[Tensor]) -> Iterator[_Seen]:
    found = next(((p, p.grad) for p in parameters if p.grad is not None), None)
    if found is not None:
        yield _Seen(found[0], id(found[1]), found[1]._version)


class _Count:
    """Of an optimizer's steps; it holds neither the optimizer nor the training."""

    def __init__(self) -> None:
        self.num = 0
        self.found_inf: Tensor | None = None
        """Of the last: what a loss scaler gave an optimizer that skips the step by itself
        (torch 2.13, amp/grad_scaler.py, ``step``)."""

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.num += 1
        self.found_inf = getattr(optimizer, "found_inf", None)


class Guard:
    """Watches an optimizer's steps, and its first and last gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._steps = _Count()
        self._num_steps = 0
        self._seen: tuple[_Seen, ...] = ()
        self._num_dropped = 0
        self.sees_steps = False
        """Whether the optimizer has hooks: a wrapper that did not call ``Optimizer.__init__`` has none."""
        with suppress(AttributeError):
            optimizer.register_step_post_hook(self._steps)
            self.sees_steps = True

    def begin(self) -> None:
        """A step's first micro-batch comes: forget steps that the optimizer took before (to create its state)."""
        self._num_steps = self._steps.num

    def look(self) -> None:
        """A backward pass has ended: note the gradients."""
        groups = self._optimizer.param_groups
        self._seen = (
            *_first_seen(p for group in groups for p in group["params"]),
            *_first_seen(p for group in reversed(groups) for p in reversed(group["params"])),
        )

    def check_between(self) -> None:
        """Another micro-batch of the same step comes.

        Raises:
            TaskError: the optimizer has stepped, or the gradients so far are others.
        """
        self._check_steps()
        if not all(seen.is_unchanged for seen in self._seen):
            raise TaskError(
                "the gradients of an optimizer step were cleared or changed between two of its micro-batches, which "
                "would lose the earlier ones. Leave optimizer.zero_grad() out (training.optimizer_step() does it), and "
                "change gradients once they are whole: `if training.backward(loss): clip(...)`."
            )

    def check_before_step(self) -> None:
        """The step is whole, and is about to be taken.

        Raises:
            TaskError: the optimizer has stepped, or there are no gradients any more.
        """
        self._check_steps()
        groups = self._optimizer.param_groups
        if self._seen and all(p.grad is None for group in groups for p in group["params"]):
            raise TaskError(
                "the gradients were cleared between training.backward and training.optimizer_step(), which would step "
                "on nothing. Leave optimizer.zero_grad() out: training.optimizer_step() does it."
            )

    def took_step(self) -> bool | Tensor:
        """Whether the optimizer stepped since :meth:`check_before_step`. A loss scaler skips a step by not calling it;
        a fused one decides on the device, so that it is a tensor."""
        if self._steps.num == self._num_steps or self._steps.found_inf is None:
            return self._steps.num != self._num_steps
        return self._steps.found_inf == 0

    def stepped(self) -> None:
        """The step was taken."""
        self._num_steps, self._seen, self._num_dropped = self._steps.num, (), 0

    def dropped(self, num_micro: int, wanted: int) -> None:
        """A loop has left a step half done.

        Raises:
            TaskError: so was the last one.
        """
        self._num_dropped += 1
        if self._num_dropped > 1:
            raise TaskError(
                f"no optimizer step is ever taken: training.loader was iterated anew after {num_micro} of the {wanted} "
                f"micro-batches of a step, {self._num_dropped} times in turn. Go on with one iteration, "
                "`batches = iter(training.loader)` and `next(batches)`, in place of `next(iter(training.loader))`."
            )

    def not_taken(self) -> str:
        """What to tell of a step that was whole when a further backward pass came."""
        self._check_steps()
        return (
            "a further micro-batch came, but the last optimizer step was not taken. Call training.optimizer_step() "
            "after each training.backward(loss): it does nothing until the step is whole."
        )

    def _check_steps(self) -> None:
        if self._steps.num != self._num_steps:
            raise TaskError(
                "optimizer.step() was called on what training.backward had added. Call training.optimizer_step() in "
                "its place, after each training.backward(loss): it steps once all micro-batches are there, and clears "
                "the gradients."
            )
