"""Measures a script's speed and memory: pushes the optimizer steps that it is seen to make into the engine that times
all trials."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any, NoReturn

import torch

from ...measure.checks.parity import compare, course_of, why_unlike
from ...measure.errors import NonFiniteLoss
from ...measure.evaluation import EvaluationRecord
from ...measure.measurement import NO_EVALUATION, NUM_STEPS, Evaluated, Measurement, Parity
from ...measure.memory import Charge, of_others
from ...measure.timing.compile_time import CompileTime
from ...measure.timing.engine import Reading, Timing, WarmUp
from ...measure.timing.moments import DeviceClock, moment
from ...nested import samples_in
from ...workers import Measured, NonFinite, Outcome
from ...workers.request import MeasureRequest
from ..observer import Observer

_STEPS_AFTER_FIRST = 2
"""Fewest steps of a warm-up, after the script's first."""


class ScriptTiming(Observer):
    """Warm-up, then windows. What the script does between steps (checkpoints, logs) is in them. Evaluations are
    not, unless it makes one after each step."""

    decides_together = False
    """Only the first process is measured."""
    num_ahead = 0
    """A script's own loaders are left alone."""

    def __init__(
        self,
        request: MeasureRequest,
        began_s: float,
        answer: Callable[[Outcome], NoReturn],
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            request: how long, and what the budget is.
            began_s: when the process came to the script, by ``time.monotonic``.
            answer: takes the outcome, and ends the script.
            tell: takes what the trial is doing.
        """
        super().__init__(torch.device(request.device))
        self._options, self._answer, self._tell = request.options, answer, tell
        self._clock = DeviceClock()
        self._charge = Charge(self._device)
        self._compile_time = CompileTime()
        self._began_s, self._first_s, self._timed_s = began_s, 0.0, 0.0
        self._phases_s: dict[str, float] = {}
        self._step_losses: dict[int, float] = {}
        self._rates: list[list[float]] = []
        """At each of the first steps, of each parameter group."""
        self._num_samples: list[int] = []
        self._has_evaluated = False
        self._evaluated_after = -1
        """How many steps there were when it last evaluated."""
        self._is_of_step = False
        """Whether it evaluates after each."""
        self._pause = _Pause(self._device, self._compile_time)
        self._evaluations = _Evaluations(request.plan.evaluation_batch, self._device, self._compile_time)
        self._warm_up: WarmUp | None = None
        self._timing: Timing | None = None

    def evaluated(self, inputs: Any = None) -> None:
        """An evaluation was seen: the peak includes it, and the windows leave it out."""
        super().evaluated(inputs)
        self._has_evaluated = True
        if inputs is not None:
            self._evaluations.call(samples_in(inputs))
        if self._evaluated_after != self.num_steps:
            self._is_of_step = self._evaluated_after == self.num_steps - 1
            self._evaluated_after = self.num_steps
        if self._timing is not None and not self._is_of_step:
            self._pause.begin()

    def training_goes_on(self) -> None:
        """An evaluation is over, if there was one."""
        self._pause.end()
        self._evaluations.end(lambda: self._charge.peak().process)

    def stepped(self, optimizer: torch.optim.Optimizer, num_backwards: int) -> None:
        """A step has ended: warm up, or close the window if it is long enough."""
        super().stepped(optimizer, num_backwards)
        if self.num_steps <= NUM_STEPS:
            self._rates.append([float(group.get("lr", 0.0)) for group in optimizer.param_groups])
            self._num_samples.append(self.num_samples)
        self._step()
        self._pause.may_begin()

    def _step(self) -> None:
        if self._warm_up is None:
            self.settle()
            self._first_s = time.monotonic()
            self._phases_s["load"] = self._first_s - self._began_s
            self._tell("training")
            self._warm_up = WarmUp(self, self._charge, self._options, _STEPS_AFTER_FIRST)
        elif self._timing is None:
            if self._warm_up.stepped():
                self._timed_s = time.monotonic()
                self._phases_s["warmup"] = self._timed_s - self._first_s - self._warm_up.at_rest_s
                self._timing = Timing(self, self._charge, self._options, self._warm_up.side)
        elif self._timing.stepped():
            outcome = self.finish()
            assert outcome is not None, "it ends with enough windows"
            self._answer(outcome)

    def finish(self) -> Outcome | None:
        """The measurement over all windows; None if there are too few."""
        if self._timing is None:
            return None
        self._timing.end()
        if (result := self._timing.result()) is None:
            return None
        self._phases_s["timed"] = time.monotonic() - self._timed_s - self._timing.at_rest_s
        return Measured(
            measurement=Measurement(
                **result,
                peak=self._charge.peak(),
                parity=self._parity(),
                epoch_start_s=0.0,
                compile_s=self._compile_time.seconds(),
                graph_breaks=self._compile_time.graph_breaks(),
                evaluations=self._evaluations.found(),
                phases_s=self._phases_s,
                warnings=(*(() if self._has_evaluated else (NO_EVALUATION,)), *of_others(), *self._timing.warnings()),
            )
        )

    def read(self) -> Reading:
        """Now, as a :class:`~autotune.measure.timing.engine.Meter` tells: without the script's evaluations."""
        return Reading(
            perf_counter() - self._pause.seconds,
            process_time() - self._pause.cpu_s,
            0.0,
            self._compile_time.seconds(),
            self.waits.host_s,
            self.num_samples,
            self.num_steps,
        )

    def mark(self) -> Callable[[], Reading]:
        """As :meth:`read`, once the device has come here; by its clock."""
        losses = self.losses.look()
        at, now, num_waits, paused_s = moment(self._device), self.read(), self.waits.num, self._pause.seconds

        def reading() -> Reading:
            seconds = self._clock.seconds(at)
            self._note(losses())
            return now._replace(device_s=seconds - paused_s, wait_s=self.waits.seconds(num_waits))

        return reading

    def at_edge(self) -> None:
        """Between windows there is nothing to do."""

    def _parity(self) -> Parity:
        """Hold the first optimizer steps against the reference's: each loss if a script's runs are alike, or their
        sum."""
        options, losses = self._options, tuple(self._step_losses.values())
        if options.parity_batch is None:
            return Parity(losses=())
        course, reference = course_of(self._rates, self._num_samples), options.reference_losses or ()
        found, of_sum = Parity(losses=losses), reference if options.sums_only else ()
        if losses and not options.sums_only:
            found = compare(losses, options.reference_losses, options.parity_limit, options.rounded_losses)
        if options.reference_course is None:
            return found.model_copy(update={"course": course})
        unlike = why_unlike(course, options.reference_course, losses, of_sum)
        return found.model_copy(update={"course": course, "unlike": unlike, "compared": found.compared or "sums"})

    def settle(self) -> None:
        """Wait for the device, and look at the losses since the last time."""
        losses = self.losses.look()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._note(losses())

    def _note(self, losses: list[tuple[int, float]]) -> None:
        for step, loss in losses:
            if not math.isfinite(loss):
                self._answer(NonFinite(step=step, message=str(NonFiniteLoss(step, loss))))
            if step <= NUM_STEPS:
                self._step_losses[step] = self._step_losses.get(step, 0.0) + loss


class _Pause:
    """What evaluations took of a window: from the end of the step before one, or, on CUDA, where steps end later than
    they are seen to, from its first call of the model."""

    def __init__(self, device: torch.device, compile_time: CompileTime) -> None:
        self.seconds = self.cpu_s = 0.0
        """Without what compiling takes."""
        self._compile_time = compile_time
        self._waits = device.type == "cuda"
        self._since: tuple[float, float] | None = None
        self._step_ended: tuple[float, float] | None = None

    def may_begin(self) -> None:
        """A step has ended."""
        self._step_ended = None if self._waits else self._now()

    def begin(self) -> None:
        """The model is called to evaluate."""
        if self._since is None:
            if self._waits:
                torch.cuda.synchronize()
            self._since = self._step_ended or self._now()

    def end(self) -> None:
        """Training goes on."""
        self._step_ended = None
        if self._since is not None:
            if self._waits:
                torch.cuda.synchronize()
            now = self._now()
            self.seconds += now[0] - self._since[0]
            self.cpu_s += now[1] - self._since[1]
            self._since = None

    def _now(self) -> tuple[float, float]:
        """Wall time but for compiling, and processor time of this process."""
        return perf_counter() - self._compile_time.seconds(), process_time()


class _Evaluations:
    """Of the script's own: told of each call of the model to evaluate, and of the end of each evaluation."""

    def __init__(self, batch: int | None, device: torch.device, compile_time: CompileTime) -> None:
        """
        Args:
            batch: samples that the script was told to evaluate at once; None where it was told of none.
            device: that it runs on.
            compile_time: left out of an evaluation's time.
        """
        self._batch, self._device, self._compile_time = batch, device, compile_time
        self._record: EvaluationRecord | None = None
        self._last: Evaluated | None = None

    def call(self, num_samples: int) -> None:
        """The model evaluates so many samples."""
        self._record = self._record or EvaluationRecord(self._device, self._compile_time)
        self._record.call(num_samples)

    def end(self, peak_bytes: Callable[[], int]) -> None:
        """Training goes on, after an evaluation or not."""
        if self._record is not None:
            self._last, self._record = self._record.ended(self._batch, peak_bytes), None

    def found(self) -> tuple[Evaluated, ...]:
        """The last of them, which nothing was new to; none of a script that was not told how many samples to take."""
        if self._batch is None:
            return ()
        return (self._last or Evaluated(batch=self._batch, seconds=0.0, is_whole=False, peak_bytes=0),)
