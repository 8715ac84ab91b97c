"""Runs optimizer steps in pieces under a ``Watch``: a tracer, a clock, or one that records nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...data.positions import Position
from ...task import Task
from ...techniques.support.facts import Lengths
from ...training.training import Training
from ..errors import NonFiniteLoss
from ..feed import Feed, largest, repeated
from ..lengths import longest_batches
from ..steps import Step
from .allocations import Phase

W = TypeVar("W", bound="Watch")

_MOST_TRIES = 3
"""Most steps until one is whole: only an epoch's last is short."""


class Watch:
    """Is told of a step's parts as they run; this one records nothing. A context around the step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def batch(self, batch: Any) -> None:
        """A micro-batch has arrived."""

    def phase(self, phase: Phase, loss: Any = None) -> AbstractContextManager[None]:
        """A context for a part of the step; ``backward`` gets the loss that it starts from."""
        return nullcontext()


def watched_step(
    training: Training, task: Task, micro_batches: Iterable[tuple[Any, Position]], watch: Watch
) -> tuple[Step, Any]:
    """Run one optimizer step as ``Training.step`` does, piece by piece; returns the last micro-batch's loss."""
    num_samples = 0
    with watch:
        for batch, position in micro_batches:
            num_samples += position.num_samples
            watch.batch(batch)
            with watch.phase(Phase.FORWARD), training.forward_context():
                loss = task.compute_loss(training.model, batch)
            with watch.phase(Phase.BACKWARD, loss):
                training.backward(loss)
        with watch.phase(Phase.OPTIMIZER):
            stepped = training.optimizer_step()
    return Step(num_samples, stepped), loss


class WatchedSteps:
    """Optimizer steps over the training's own loader."""

    def __init__(
        self, training: Training, task: Task, largest_of: int | None = None, lengths: Lengths | None = None
    ) -> None:
        """
        Args:
            training: what to run.
            task: whose ``compute_loss`` it was built with.
            largest_of: every micro-batch is the largest of so many; None takes them as they come.
            lengths: every micro-batch is the largest that samples can make.
        """
        self.training = training
        self.num_steps = 0
        """Optimizer steps so far."""
        self._task = task
        self._feed = Feed(training.loader)
        self._largest = None if largest_of is None else self._feed.largest_of(largest_of)
        if lengths is not None:
            self._largest = largest(batch for batch, _ in longest_batches(training.loader, lengths))

    def step(self, watch: Watch) -> Step:
        """One optimizer step.

        Raises:
            NonFiniteLoss: the loss was NaN or infinite.
        """
        self.num_steps += 1
        loader = self.training.loader
        micro_batches = self._feed.step() if self._largest is None else repeated(loader, self._largest)
        step, loss = watched_step(self.training, self._task, micro_batches, watch)
        value = float((loss[0] if isinstance(loss, tuple) else loss).detach())
        if not math.isfinite(value):
            raise NonFiniteLoss(self.num_steps, value)
        return step

    def whole_step(self, watch: Callable[[], W]) -> W:
        """Run steps, each under a watch of its own, until one has all its samples.

        Returns:
            The watch of the last of them.
        """
        for _ in range(_MOST_TRIES):
            eyes = watch()
            if self.step(eyes).num_samples >= self.training.batch.num_samples:
                break
        return eyes


def nodes_of(loss: Any) -> Iterator[Any]:
    """Autograd nodes of the graph behind a loss, or a tuple that has one, without those that accumulate into
    parameters.

    A hook on those would keep the gradient alive, which is then copied instead of taken over.
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
