"""``Training``: a task with a plan applied. ``step(batch)`` is the whole loop; its pieces serve people's own loops."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.loader import Loader
from ..data.positions import Position
from ..device_memory.cap import step_begins, step_ended
from ..errors import TaskError
from ..randomness import random_state, set_random_state
from ..task import Task
from ..techniques import Settings
from ..techniques.batch import Batch
from ..techniques.support.replica import Replica, within
from .gradients import Count, Gradients, divisor, read_loss
from .guard import Guard
from .halving import CALM_STEPS, Halving
from .resume import check_state
from .together import Together

_OF_A_COPY = (
    " The plan makes another model of the job's: a copy that was made before autotune.apply, such as a weight average "
    "(AveragedModel), is of other shapes. Make it of the model that this function is given, at its first call."
)


@dataclass(frozen=True)
class StepResult:
    """Result of one micro-batch."""

    loss: torch.Tensor
    """The micro-batch's mean loss, detached."""
    took_step: bool | torch.Tensor
    """``stepped``, on the device where only that knows."""
    count: Count
    """What the mean is over: samples, or the count that came with the loss, on its device."""

    @property
    def stepped(self) -> bool:
        """Whether the optimizer stepped (a loss scaler that found infinite gradients skips its step). In fp16 with a
        fused optimizer this waits for the device."""
        return bool(self.took_step)

    @property
    def weight(self) -> float:
        """``count`` as a number; waits for the device."""
        return float(self.count)


class Training:
    """A model, its optimizer and its loader, with every technique of a plan applied.

    Built by :func:`autotune.apply`. Gradients of the micro-batches of one optimizer step add up to the gradient of the
    whole effective batch: each mean loss is weighted by its share of the samples, each ``(loss_sum, count)`` by the
    step's total count. A batch of ``loader`` is known again, however far ahead a loop fetches. A loop that leaves an
    optimizer step half done and iterates the loader anew begins another: what had been added is dropped. What would
    train otherwise than it reads (``zero_grad`` or ``optimizer.step`` within a step, a step never taken) is an error.

    One of several ranks trains on its share of each optimizer step; ``loss`` and ``count`` of a result are its own.
    Gradients are the whole step's, over all ranks, once the last micro-batch is there.
    """

    evaluation_batch: int | None = None
    """Samples to evaluate at once, ``evaluate(training.model, training.evaluation_batch)``: the plan's; without one
    what the task's ``evaluate`` has; None where that takes no ``batch_size``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        task: Task,
        settings: Settings,
        halve_when_out_of_memory: bool = False,
        calm_steps: int = CALM_STEPS,
    ) -> None:
        self._together = Together(model) if halve_when_out_of_memory and loader.ranks.size > 1 else None
        self.model = model if self._together is None else self._together.model
        self.optimizer = optimizer
        self.loader = loader
        self.settings = settings
        self.device = loader.device
        scales = any(technique.scales_loss for technique in settings.techniques())
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scales)
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        if scales and is_torchs and all(group.get("fused") for group in optimizer.param_groups):
            # Its kernel unscales gradients, and leaves a step out, by itself. Without this, which torch sets where an
            # optimizer is built fused, the scaler waits for the device at each step (torch 2.13, amp/grad_scaler.py,
            # _maybe_opt_step).
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._task, self._compute_loss = task, task.compute_loss
        self._done: Position | None = None
        self._guard = Guard(optimizer)
        self._halving = Halving(loader.batch, halve_when_out_of_memory, self._together, calm_steps)
        self._gradients = Gradients(optimizer, loader, self._halving, settings.parallel.kind == "tensor")
        self._lends_gradients = any(technique.lends_gradients for technique in settings.techniques())
        self._own = within(model)
        self._advice = _OF_A_COPY if settings.affect("function") else ""

    def with_loader(self, loader: Loader) -> Training:
        """The same model, optimizer and scaler over other micro-batches."""
        other = Training(self.model, self.optimizer, loader, self._task, self.settings)
        other.scaler, other._together = self.scaler, self._together
        return other

    @property
    def batch(self) -> Batch:
        """How an optimizer step is split into forward passes."""
        if not self._halving.times:
            return self.loader.batch
        return self._halving.batch

    @property
    def times_halved(self) -> int:
        """How often ``step`` has halved the micro-batch and not doubled it again; the loader's batches stay as they
        were."""
        return self._halving.times

    def step(self, batch: Any) -> StepResult:
        """Forward, backward, and after the last micro-batch of an optimizer step the optimizer.

        Args:
            batch: a micro-batch on the device, as ``loader`` yields it.

        Returns:
            The detached mean loss, and whether the optimizer stepped.

        Raises:
            TaskError: ``compute_loss`` returned neither a scalar tensor nor (loss_sum, count), or the loop does
                something between micro-batches that would train otherwise than it reads, or a function
                of the task raised after the backward pass or the step.
        """
        position = self.loader.positions.take(batch)  # before the loss, which may take a batch apart
        last = self._gradients.position
        left = last is not None and position is not None and position.epoch != last.epoch
        begins = not self._gradients.num_added or left
        added = self._gradients.num_added
        mean, count = self._halving.run(
            batch, position, begins, self._pass, self._gradients.clear, lambda: self._gradients.num_added == added
        )
        took_step = self._take_step()
        if not self._gradients.num_added:
            self._halving.step_ended()
        return StepResult(mean, took_step, count)

    def _pass(self, batch: Any, position: Position | None) -> tuple[torch.Tensor, Count]:
        """Forward and backward; the detached mean loss, and what it is over."""
        self.loader.positions.pass_over()
        with self._forward_of(position):
            loss = self._compute_loss(self.model, batch)
        count = self._add(loss, position)
        mean = loss[0] / divisor(count) if isinstance(loss, tuple) else loss
        return mean.detach(), count

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context for the forward pass and the loss (autocast)."""
        self.loader.positions.pass_over()
        return self._forward_of(self.loader.positions.next())

    def _forward_of(self, position: Position | None) -> AbstractContextManager[Any]:
        step_begins()
        if isinstance(self.model, Replica) and torch.is_grad_enabled():
            ends = position is not None and position.ends_step
            self.model.begin(averages=ends or self._gradients.num_added + 1 >= self._gradients.num_passes)
        return self.settings.forward_context(self.device.type)

    def backward(self, loss: torch.Tensor | tuple[torch.Tensor, Any], batch: Any = None) -> bool:
        """Add a micro-batch's share to the gradients of the current optimizer step.

        The loss is detached, so that a loop that keeps it takes the memory that ``step`` does.

        Args:
            loss: the micro-batch's mean loss, or (loss_sum, count).
            batch: the micro-batch that it is of, as ``loader`` yielded it, for loops that leave batches out or take
                them in another order; without it, it is the one that has waited longest.

        Returns:
            Whether that was the last micro-batch: the gradients are now the step's true ones, unscaled. A task that
            states no ``max_grad_norm`` clips them now; ``optimizer_step`` does it otherwise.

        Raises:
            TaskError: the loss is neither of the two, or the last step was not taken by ``optimizer_step``, or what
                it had added is gone (``zero_grad``), or the task's ``after_backward`` raised.
        """
        self._add(loss, self.loader.positions.take(batch))
        value = loss[0] if isinstance(loss, tuple) else loss
        if not (value.is_leaf or value._is_view()):  # torch does not detach a view in place
            value.detach_()
        return self._gradients.is_whole

    @property
    def epoch(self) -> int:
        """Which epoch the next micro-batch is of, from 0: ``for epoch in range(training.epoch, num_epochs)``."""
        return self.loader.where(self._done)[0]

    def state_dict(self) -> dict[str, Any]:
        """All that the job needs to go on as if it had not ended: model, optimizer, loss scaler, the place in the epoch
        and the order of its samples, the state of everything random, and, in the middle of an optimizer step, its
        gradients so far.

        Returns:
            What ``torch.save`` writes and ``torch.load(weights_only=True)`` reads. Its tensors are the live ones, as
            in every ``state_dict`` of torch: save it, or copy it, before the next step.

        Raises:
            TaskError: a step's gradients are whole, and the step is not taken.
        """
        if self._gradients.is_whole:
            raise TaskError(
                "state_dict was called between training.backward, which made an optimizer step's gradients whole, and "
                "training.optimizer_step(). Call it after that."
            )
        return self._state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the point at which :meth:`state_dict` was called; the next iteration over ``loader`` begins there.
        Nothing random may be drawn in between.

        Raises:
            PlanError: it is no such state, or one of other settings, another model, optimizer or data set. Nothing is
                changed then.
        """
        check_state(state, self._state())
        self._halving.load_state_dict(state["halved"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self._gradients.clear()
        self._done = None
        self._guard.stepped()
        self._halving.forget(has_all=not state["step"])
        if state["step"]:
            self._gradients.load_state_dict(state["step"])
            self._guard.begin()
            self._guard.look()
        self.loader.load_state_dict(state["loader"])
        set_random_state(state["random"])

    def _state(self) -> dict[str, Any]:
        return {
            "version": 1,
            "settings": self.settings.having(self.loader.batch).canonical(),
            "halved": self._halving.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self._gradients.state_dict(),
            "loader": self.loader.state_dict(self._done),
            "random": random_state(),
        }

    def _add(self, loss: Any, position: Position | None) -> Count:
        """Backward of the micro-batch's share of its optimizer step; returns what its mean is over."""
        value, count = read_loss(loss)
        gradients = self._gradients
        if gradients.is_whole:
            raise TaskError(self._guard.not_taken())
        self._done = position or self._done
        position = position or self._assumed_position()
        if gradients.position is not None and position.epoch != gradients.position.epoch:
            self._drop(gradients.position, position)
        if gradients.num_added:
            self._guard.check_between()
        else:
            self._guard.begin()
        share, weight = gradients.share(value, count, position, in_step=self._together is None)
        with ExitStack() as undone:  # out of memory, and the loop may go on: half a backward pass is no gradient
            undone.callback(gradients.clear)
            self.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
            undone.pop_all()
        if self._lends_gradients and gradients.num_added == 1 and not gradients.is_whole:
            gradients.copy()
        if isinstance(self.model, Replica):
            self.model.check(averages=gradients.is_whole)
        if gradients.is_whole:
            self._finish_gradients(counts=count is not None)
        self._guard.look()
        return weight

    def _finish_gradients(self, counts: bool) -> None:
        """All backward passes of the step are made: its gradients become the true ones."""
        self._halving.agree()
        self._gradients.settle(counts, in_step=self._together is None)
        if self._together is not None:
            self._together.exchange()
        self.scaler.unscale_(self.optimizer)
        self._task.call("after_backward", self._own, self._advice)

    def optimizer_step(self) -> bool:
        """Clip and step the optimizer if the current micro-batch ends its optimizer step.

        Returns:
            Whether the optimizer stepped.

        Raises:
            TaskError: the optimizer was stepped already, or the gradients are gone, or the task's ``after_step``
                raised.
        """
        return bool(self._take_step())

    def _take_step(self) -> bool | torch.Tensor:
        """:meth:`optimizer_step`, without waiting for the device."""
        if not self._gradients.is_whole:
            return False
        self._guard.check_before_step()
        if self._task.max_grad_norm is not None:
            self._gradients.clip(self.model, self._task.max_grad_norm)
        asks_scale = self.scaler.is_enabled() and not self._guard.sees_steps
        before = self.scaler.get_scale() if asks_scale else 0.0
        self.scaler.step(self.optimizer)
        self.scaler.update()
        took_step: bool | torch.Tensor = True
        if self.scaler.is_enabled():
            took_step = self.scaler.get_scale() >= before if asks_scale else self._guard.took_step()
        self._gradients.clear()
        self._guard.stepped()
        step_ended()
        if self._task.after_step is not None and took_step:
            self._task.call("after_step", self._own, self._advice)
        return took_step

    def _drop(self, left: Position, begun: Position) -> None:
        """The loop left its last step half done, and iterates the loader anew: drop its gradients."""
        if begun.epoch < left.epoch:
            raise TaskError(
                f"training.loader is iterated twice at once, and optimizer steps of {self.batch.accumulate} "
                "micro-batches are made of both. Take a step's micro-batches from one iteration."
            )
        self._guard.dropped(self._gradients.num_added, self.batch.accumulate)
        self._gradients.clear()

    def _assumed_position(self) -> Position:
        """For batches that are not our loader's: full micro-batches, ``accumulate`` of them to a step."""
        if not self._gradients.num_added:
            warnings.warn(
                f"a batch that is not training.loader's: it is taken for {self.batch.micro} samples, and "
                f"{self.batch.accumulate} of them for one optimizer step.",
                stacklevel=4,
            )
        epoch = self._gradients.position.epoch if self._gradients.position else 0
        ends = self._gradients.num_added + 1 >= self._gradients.num_passes
        return Position(self.batch.micro, ends, epoch)
