"""Measures a script's speed and memory: pushes the optimizer steps that it is seen to make into the engine that times
all trials."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter, process_time
from typing import Any, NoReturn

import torch

from ...measure.checks.parity import compare, course_of, why_unlike
from ...measure.errors import NonFiniteLoss
from ...measure.evaluation import EvaluationRecord
from ...measure.life.batches import Batches
from ...measure.life.growth import Pile
from ...measure.measurement import NO_EVALUATION, NUM_STEPS, Evaluated, Measurement, Parity
from ...measure.memory import LOOKS_S, Charge, of_others
from ...measure.timing.compile_time import CompileTime
from ...measure.timing.engine import Reading, Timing, WarmUp
from ...measure.timing.moments import DeviceClock, moment
from ...nested import samples_in
from ...plan import PhasePeak
from ...ranks import world_size
from ...workers import Measured, NonFinite, Outcome
from ...workers.request import MeasureRequest
from ..observer import Observer
from .life import EpochsEnd
from .longest import longest_batch

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
        obstacle: str | None = None,
    ) -> None:
        """
        Args:
            request: how long, and what the budget is.
            began_s: when the process came to the script, by ``time.monotonic``.
            answer: takes the outcome, and ends the script.
            tell: takes what the trial is doing.
            obstacle: why its epoch is not ended early, once all is timed; None where it may be.
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
        self._evaluations = _Evaluations(request.plan.evaluation_batch, self._charge, self._compile_time, self._device)
        self.has_saved = self._has_loaded = False
        life = None if obstacle is not None or world_size() > 1 else request.options.life
        self._epochs_end = EpochsEnd(life, self._end) if life is not None else None
        self._measured: Measurement | None = None
        """What was timed; None until then."""
        self._longest = longest_batch(request)
        self._warm_up: WarmUp | None = None
        self._timing: Timing | None = None

    def epoch(self, iterator: Any, loader: Any) -> None:
        """The longest batch comes first in it, if the one before ended without."""
        super().epoch(iterator, loader)
        if self._longest is not None and self._longest.is_awaited and loader in self._loaders_trained_on:
            self._longest.put_into(iterator, loader)

    def _count(self, draw: Any) -> None:
        super()._count(draw)
        if self._longest is not None:
            self._longest.drawn(draw.iterator)

    def evaluated(self, inputs: Any = None) -> None:
        """An evaluation was seen: the peak includes it, and the windows leave it out."""
        super().evaluated(inputs)
        self._has_evaluated = True
        self._charge.enter_once("evaluation")
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
        self._evaluation_ended()

    def _evaluation_ended(self) -> None:
        self._evaluations.end(lambda: self._charge.peak().process)
        self._charge.enter_once("training" if self._timing is None else None)

    def draws_to_evaluate(self, iterator: Any) -> bool:
        """Which tells how many batches an evaluation has, and when the next begins."""
        awaited = self._epochs_end if self._epochs_end is not None and self._epochs_end.is_awaited else None
        if awaited is not None and self._evaluations.may_end(awaited.most_s / 8):
            return True
        self._evaluations.draws(iterator)
        return False

    def saves(self, save: Callable[[], Any]) -> Any:
        """A phase of its own."""
        if self._charge.phase == "evaluation":
            self._evaluation_ended()
        before = self._charge.phase
        self._charge.enter("saving")
        self.has_saved = True
        try:
            return save()
        finally:
            self._charge.enter(before)

    def loads(self, source: Any) -> None:
        """Before it trains: it resumes, if that was saved by the trial before."""
        folder, path = self._options.resumes_from, getattr(source, "name", source)
        if folder is not None and isinstance(path, str | os.PathLike):
            with suppress(OSError):
                self._has_loaded |= os.path.getmtime(path) >= os.path.getmtime(folder)

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
            self._charge.first_step_ended()
            self._first_s = time.monotonic()
            self._phases_s["load"] = self._first_s - self._began_s
            self._tell("training")
            self._warm_up = WarmUp(self, self._charge, self._options, _STEPS_AFTER_FIRST)
        elif self._timing is None:
            if self._warm_up.stepped():
                self._timed_s = time.monotonic()
                self._phases_s["warmup"] = self._timed_s - self._first_s - self._warm_up.at_rest_s
                self._timing = Timing(self, self._charge, self._options, self._warm_up.side)
        elif self._measured is None and self._timing.stepped():
            self._measured = self._timed()
            assert self._measured is not None, "it ends with enough windows"
            if self._longest is not None and not self._options.is_out(self._measured.stopped):
                for iterator in [one for one in self._trained_on if self._loaders.get(one) in self.drawn_from]:
                    self._longest.put_into(iterator, self._loaders[iterator])
            self._go_on_to_end()
        elif self._longest is not None and self._measured is not None and not self._is_ending:
            self._go_on_to_end()
        self.drawn_from.clear()

    def _go_on_to_end(self) -> None:
        """All is timed: once the longest batch was trained on, if one is awaited, the epoch ends, and so the trial."""
        if (self._longest is not None and self._longest.is_awaited) or self._measured is None:
            return
        loaders = [one for one in self.drawn_from if one in self._loaders_trained_on]
        if self._epochs_end is None or not loaders or self._options.is_out(self._measured.stopped):
            self._end()
        self._epochs_end.await_next(loaders)

    @property
    def _is_ending(self) -> bool:
        """Whether the epoch's end is awaited."""
        return self._epochs_end is not None and self._epochs_end.is_awaited

    @property
    def is_timed(self) -> bool:
        """Whether all is timed."""
        return self._measured is not None

    def _end(self) -> NoReturn:
        outcome = self.finish()
        assert outcome is not None, "it was measured"
        self._answer(outcome)

    def epoch_begins(self, loader: Any) -> None:
        """Of the next epoch: the script has done what it does between two."""
        if self._epochs_end is not None:
            self._epochs_end.begins(loader)

    def ends_early(self, loader: Any) -> bool:
        """Once all is timed."""
        if self._epochs_end is None or not self._epochs_end.is_awaited:
            return False
        return self._epochs_end.ends(loader) or self._evaluations.may_end(self._epochs_end.most_s / 8)

    def finish(self) -> Outcome | None:
        """The measurement over all windows, with what was seen of the rest of the script's life; None if there are too
        few windows."""
        if self._epochs_end is not None:
            self._epochs_end.close()
        measured = self._measured or self._timed()
        if measured is None:
            return None
        self._evaluation_ended()
        evaluations, peak = self._evaluations.found(), self._charge.peak()
        if self._has_loaded:
            peak = peak.with_phases({**peak.phases, "resuming": PhasePeak(process=peak.process, host=peak.host)})
        said = (*(() if self._has_evaluated else (NO_EVALUATION,)), *of_others(), *measured.warnings)
        if self._longest is not None and self._longest.is_over:
            peak = peak.model_copy(update={"longest": self._longest.how})
        update = {"peak": peak, "evaluations": evaluations, "warnings": said}
        return Measured(measurement=measured.model_copy(update=update))

    def _timed(self) -> Measurement | None:
        if self._timing is None:
            return None
        self._timing.end()
        if (result := self._timing.result()) is None:
            return None
        self._phases_s["timed"] = time.monotonic() - self._timed_s - self._timing.at_rest_s
        return Measurement(
            **result,
            peak=self._charge.peak(),
            parity=self._parity(),
            epoch_start_s=0.0,
            compile_s=self._compile_time.seconds(),
            graph_breaks=self._compile_time.graph_breaks(),
            phases_s=self._phases_s,
            warnings=tuple(self._timing.warnings()),
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

    def __init__(self, batch: int | None, charge: Charge, compile_time: CompileTime, device: torch.device) -> None:
        """
        Args:
            batch: samples that the script was told to evaluate at once; None where it was told of none.
            charge: reads memory.
            compile_time: left out of an evaluation's time.
            device: that it runs on.
        """
        self._batch, self._charge, self._device, self._compile_time = batch, charge, device, compile_time
        self._record: EvaluationRecord | None = None
        self._batches: Batches | None = None
        self._drawn_before: list[Any] = []
        """Iterators that were asked for a batch before the evaluation's first call."""
        self._last: Evaluated | None = None

    def draws(self, iterator: Any) -> None:
        """A batch is asked for that may be to evaluate."""
        if self._batches is not None:
            self._batches.drawn(iterator)
        else:
            self._drawn_before = [iterator]

    def may_end(self, most_s: float) -> bool:
        """Whether its loaders end early: it has had so many seconds, and something piles up in it."""
        if self._record is None or self._batches is None:
            return False
        return self._batches.ends(self._record.seconds() / most_s)

    def call(self, num_samples: int) -> None:
        """The model evaluates so many samples."""
        if self._record is None:
            self._record = EvaluationRecord(self._device, self._compile_time)
            self._batches = Batches(
                Pile(self._charge.witness(), partial(self._charge.phase_bytes, LOOKS_S)), self._charge.taken
            )
            for iterator in self._drawn_before:
                self._batches.drawn(iterator)
            self._drawn_before.clear()
        assert self._batches is not None, "it begins with the record"
        self._batches.called()
        self._record.call(num_samples)

    def end(self, peak_bytes: Callable[[], int]) -> None:
        """Training goes on, after an evaluation or not."""
        self._drawn_before.clear()
        if self._record is not None and self._batches is not None:
            is_cut = self._batches.is_cut
            growth = self._batches.found()
            found = self._record.ended(self._batch, peak_bytes, is_whole=not is_cut)
            if growth is not None and growth.whole_bytes is not None:
                self._charge.extend("evaluation", growth)
            self._last = found.model_copy(update={"growth": growth})
            self._record = self._batches = None

    def found(self) -> tuple[Evaluated, ...]:
        """The last of them, which nothing was new to; none of a script that was not told how many samples to take,
        unless something piled up."""
        if self._batch is None:
            return (self._last,) if self._last is not None and self._last.growth is not None else ()
        return (self._last or Evaluated(batch=self._batch, seconds=0.0, is_whole=False, peak_bytes=0),)
