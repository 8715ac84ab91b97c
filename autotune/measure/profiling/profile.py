"""``profile``: allocations and time of one optimizer step, module by module."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch

from ...task import Task
from ...techniques.checkpointing import find_blocks
from ...training.training import Training
from ..memory import Charge
from .allocations import Phase, Trace
from .chrome import write_trace
from .clock import Clock
from .rows import inclusive, module_rows, peak_moment, timeline
from .tracer import Tracer
from .types import Profile, ProfileOptions
from .watch import Watch, WatchedSteps

W = TypeVar("W", bound=Watch)

_FORBIDDEN = "saved tensor hooks"
"""Part of torch.func's error where somebody watches the saved tensors."""
_MOST_SKIPPED = 40
"""Most steps that the loss scaler may skip before the first real one: it halves its scale each time."""


def profile(training: Training, task: Task, options: ProfileOptions) -> Profile:
    """Trace the first step and a steady one, then time some; in this order, in this process.

    Args:
        training: fresh from :func:`autotune.apply`.
        task: what it was built from.
        options: what to look at.

    Raises:
        NonFiniteLoss: a loss was NaN or infinite.
        Exception: whatever the user's code raises.
    """
    model, device = training.model, training.device
    charge = Charge(device, options.largest_of, longest=options.lengths and options.lengths.how)
    steps = WatchedSteps(training, task, options.largest_of, options.lengths)
    first, sees_saves = _trace_first(steps)
    steady = steps.whole_step(lambda: Tracer(model, training.optimizer, device, sees_saves))
    times = _time(steps, options.num_timed_steps) if options.num_timed_steps else None
    charge.sample_descendants()
    process = charge.peak()
    if options.trace is not None:
        write_trace(steps, Path(options.trace))
    trace = steady.trace()
    names = {module: name for name, module in model.named_modules()}
    own_s = times.own_s if times else {}
    by_module = (inclusive(own_s.get(phase, {})) if times else None for phase in (Phase.FORWARD, Phase.BACKWARD))
    return Profile(
        modules=tuple(module_rows(model, steady.order, trace, *by_module)),
        peak=peak_moment(trace),
        first_step_peak_bytes=first.peak_bytes(),
        sees_saves=sees_saves,
        process=process,
        micro_batch=training.batch.micro,
        accumulate=training.batch.accumulate,
        step_s=times.step_s if times else None,
        timed_step_s=times.timed_step_s if times else None,
        phases_s={phase: sum(own.values()) for phase, own in own_s.items()},
        timeline=timeline(trace, [names[block] for block in find_blocks(model, task.blocks)]),
    )


def _trace_first(steps: WatchedSteps) -> tuple[Trace, bool]:
    """Trace the first step, and tell whether saved tensors could be watched; run on until the optimizer has stepped."""
    training, sees_saves = steps.training, True
    tracer = Tracer(training.model, training.optimizer, training.device)
    try:
        skipped = steps.step(tracer).skipped
    except RuntimeError as error:
        if _FORBIDDEN not in str(error):
            raise
        sees_saves = False
        tracer = Tracer(training.model, training.optimizer, training.device, sees_saves)
        skipped = steps.step(tracer).skipped
    while skipped and steps.num_steps < _MOST_SKIPPED:
        skipped = steps.step(Watch()).skipped
    return tracer.trace(), sees_saves


class _Times(NamedTuple):
    step_s: float
    timed_step_s: float
    own_s: Mapping[Phase, Mapping[str, float]]


def _time(steps: WatchedSteps, num_steps: int) -> _Times:
    """Median times of steps with the clock's hooks; as many steps without run between them, so that the hooks' cost is
    known."""
    plain_s: list[float] = []
    timed: list[tuple[Clock, float]] = []
    for _ in range(num_steps):
        plain_s.append(_timed(steps, Watch())[1])
        timed.append(_timed(steps, Clock(steps.training.model, steps.training.device)))
    clock, seconds = sorted(timed, key=itemgetter(1))[num_steps // 2]
    return _Times(statistics.median(plain_s), seconds, clock.seconds())


def _timed(steps: WatchedSteps, watch: W) -> tuple[W, float]:
    """One whole step, with its clock and its seconds."""
    began_s = 0.0

    def begin() -> W:
        nonlocal began_s
        _wait(steps)
        began_s = perf_counter()
        return watch

    steps.whole_step(begin)
    _wait(steps)
    return watch, perf_counter() - began_s


def _wait(steps: WatchedSteps) -> None:
    if steps.training.device.type == "cuda":
        torch.cuda.synchronize(steps.training.device)
