"""Optimizer steps in pieces, each piece under the eyes of a ``Watch``: a tracer, a clock, or nobody."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..nested import tensors_in
from ..task import Task
from ..training import Training
from .allocations import Phase
from .errors import NonFiniteLoss
from .feed import Feed

__all__ = ["Watch", "WatchedSteps", "nodes_of"]

W = TypeVar("W", bound="Watch")

_MOST_TRIES = 3
"""Steps until one is whole: only an epoch's last one is short."""


class Watch:
    """What is told of a step as it goes; this one looks at nothing. A context around the step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def batch(self, batch: Any) -> None:
        """A micro-batch has arrived."""

    def phase(self, phase: Phase, loss: Any = None) -> AbstractContextManager[None]:
        """A part of the step; ``backward`` is told the loss that it starts from."""
        return nullcontext()


class WatchedSteps:
    """Does what ``Training.step`` does over the training's own loader, in its pieces."""

    def __init__(self, training: Training, task: Task, largest_of: int | None = None) -> None:
        """
        Args:
            training: what to run.
            task: whose ``compute_loss`` it was built with.
            largest_of: every micro-batch is the largest of so many; None takes them as they come.
        """
        self.training = training
        self.num_steps = 0
        """Optimizer steps so far."""
        self._compute_loss = task.compute_loss
        self._feed = Feed(training.loader)
        self._largest = None if largest_of is None else self._find_largest(largest_of)

    def step(self, watch: Watch) -> bool:
        """One optimizer step; whether the loss scaler let it through.

        Raises:
            NonFiniteLoss: the loss was NaN or infinite.
        """
        return self._step(watch)[1]

    def whole_step(self, watch: Callable[[], W]) -> W:
        """Steps until one has all its samples, each under a watch of its own.

        Returns:
            The watch of the last of them.
        """
        for _ in range(_MOST_TRIES):
            eyes = watch()
            if self._step(eyes)[0] >= self.training.batch.num_samples:
                break
        return eyes

    def _step(self, watch: Watch) -> tuple[int, bool]:
        self.num_steps += 1
        num_samples = 0
        with watch:
            for batch, size, ends_step in self._micro_batches():
                num_samples += size
                watch.batch(batch)
                with watch.phase("forward"), self.training.forward_context():
                    loss = self._compute_loss(self.training.model, batch)
                with watch.phase("backward", loss):
                    self.training.backward(loss)
                if ends_step:
                    break
            with watch.phase("optimizer"):
                stepped = self.training.optimizer_step()
        self._check(loss)
        return num_samples, stepped

    def _micro_batches(self) -> Iterator[tuple[Any, int, bool]]:
        batch = self.training.batch
        if self._largest is not None:
            for number in range(batch.accumulate):
                self.training.loader.positions.clear()
                yield self._largest, batch.micro, number == batch.accumulate - 1
            return
        while True:
            found, position = self._feed.next()
            yield found, position.num_samples, position.ends_step

    def _find_largest(self, num_batches: int) -> Any:
        largest, size = None, -1
        for _ in range(num_batches):
            batch, _ = self._feed.next()
            elements = sum(tensor.numel() for tensor in tensors_in(batch))
            if elements > size:
                largest, size = batch, elements
            if self._feed.has_restarted:
                break
        return largest

    def _check(self, loss: Any) -> None:
        value = float((loss[0] if isinstance(loss, tuple) else loss).detach())
        if not math.isfinite(value):
            raise NonFiniteLoss(self.num_steps, value)


def nodes_of(loss: Any) -> Iterator[Any]:
    """The autograd nodes behind a loss or a tuple that has one; those that accumulate into parameters left out.

    A hook on one of these would hold the gradient, which is then copied instead of taken.
    """
    waiting = [tensor.grad_fn for tensor in tree_leaves(loss) if isinstance(tensor, Tensor) and tensor.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if not hasattr(node, "variable"):
            yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
