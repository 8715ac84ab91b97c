"""Learning rates of a recovery: by the job's own schedule where it has one, else falling to 0."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from ...task import Task
from ...training.training import Training
from ..measurement import QualityOptions
from ..steps import Step, Steps


class Rates:
    """Sets the learning rates of each optimizer step of a recovery.

    The job's own schedule is what its ``build_scheduler`` returns; or what its ``after_step`` does to the learning
    rates, where the first step shows that it does. Without one, they fall linearly to 0: at a constant rate the quality
    scatters from seed to seed by more than a pruning costs.
    """

    def __init__(self, training: Training, task: Task, options: QualityOptions) -> None:
        """
        Args:
            training: fresh from :func:`autotune.apply`.
            task: what it was built from.
            options: how many samples, and the share of the job's learning rates.
        """
        self._options, self._optimizer = options, training.optimizer
        batch = training.settings.parallel.effective or training.loader.batch.num_samples
        self._left = math.ceil(options.num_samples / batch)
        """Steps of the schedule that are left: an epoch's short last batch makes more steps than were asked for."""
        self._scheduler = task.make_scheduler(training.optimizer, self._left)
        self._is_own = self._scheduler is not None
        self._is_decided = self._is_own or task.after_step is None
        self._own = self._now()
        self._num_steps = 0
        self._are_asked = False
        with suppress(AttributeError):  # a wrapper that did not call Optimizer.__init__ has no hooks
            self._optimizer.register_step_post_hook(lambda *_: self._put_back())

    def step(self, steps: Steps, done: float) -> Step:
        """One optimizer step, with this share of the samples behind it."""
        share = 1.0 if self._is_own else 1 - done
        asked = [rate * self._options.lr_factor * share for rate in self._own]
        self._set(asked)
        self._are_asked = True
        step = steps.step()
        if self._are_asked and self._now() == asked:  # a step that was skipped calls no hook
            self._put_back()
        if not self._is_decided and not step.skipped:
            self._is_own, self._is_decided = self._now() != self._own, True
        if self._scheduler is not None and self._left and not step.skipped:
            self._scheduler.step()
        self._own = self._now()
        self._left -= self._left > 0
        self._num_steps += 1
        return step

    @property
    def words(self) -> str:
        """How the steps so far were taken: ``100 steps, learning rate falling to 0``."""
        factor = self._options.lr_factor
        steps = f"{self._num_steps:,} step{'' if self._num_steps == 1 else 's'}"
        if self._is_own:
            return f"{steps}, learning rate by the job's own schedule{f' times {factor:g}' if factor != 1 else ''}"
        begins = f"from {factor:g} times the job's " if factor != 1 else ""
        return f"{steps}, learning rate falling {begins}to 0"

    def _put_back(self) -> None:
        """The job's own rates, which its ``after_step`` changes."""
        self._set(self._own)
        self._are_asked = False

    def _now(self) -> list[Any]:
        return [group["lr"] for group in self._optimizer.param_groups]

    def _set(self, rates: list[Any]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
