"""``measure``: runs a training for some steps and measures it."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from ..ranks import of_first, world_size
from ..task import Task
from ..training.training import Training
from ..units import ceil_mib, format_bytes
from .checks.leak import LeakWatch
from .checks.parity import run_parity
from .evaluation import measure_evaluations
from .measurement import NUM_STEPS, Evaluated, Measurement, MeasureOptions, Parity
from .memory import Charge
from .steps import Steps
from .timing.disturbance import OtherWork, Pauses, missing_share
from .timing.optimizer_time import OptimizerTime
from .timing.speed import Window, settled, speed_of, time_windows

__all__ = ["measure"]

_WARMUP_SHARE = 0.25
"""Longest warm-up, as a share of the trial's time."""
_CONFIRM_S = 10.0
"""Most seconds for confirming a leak, also in a short trial: after a handful of steps no leak would show."""
_WORTH_SAYING_BYTES = 2**20
"""Growth, bytes a step, from which on it is said although the steps are not the cause; smaller growth may be an
allocator that settles."""
_STABLE = 1.005
"""Factor by which a stable peak may still grow."""
_CALM_STEPS = 2
"""Steps in a row without a skip, and with a stable peak, before timing begins."""


def measure(training: Training, task: Task, options: MeasureOptions) -> Measurement:
    """Parity, warm-up, timed windows, evaluation, peaks; in this order, in this process.

    Args:
        training: fresh from :func:`autotune.apply`.
        task: what it was built from.
        options: how long, how precisely, and against what.

    Returns:
        The measurement, without losses where there is no parity run or ``parity_last`` leaves it to the caller.
        ``phases_s`` holds ``parity``, ``warmup``, ``timed`` and ``evaluation``.

    Raises:
        TaskError: the task's ``evaluate`` raised, or changed the model.
        NonFiniteLoss: a loss was NaN or infinite.
        Exception: whatever the user's code raises.
    """
    phases_s: dict[str, float] = {}
    steps = Steps(training, num_steps=NUM_STEPS)
    charge = Charge(training.device, options.largest_of)
    leaks = LeakWatch(charge, training.device.type)
    with _timed(phases_s, "parity"):
        if training.loader.options["num_workers"]:
            steps.feed.open()  # workers are forked from a process as small as a job's
        parity = Parity(losses=())
        if options.parity_batch is not None and not options.parity_last:
            parity = run_parity(training, task, options, leaks.note)
    with _timed(phases_s, "warmup"):
        if options.largest_of:
            steps.repeat(steps.feed.largest_of(options.largest_of))
            steps.settle()
        warnings = _warm_up(steps, charge, leaks, options.trial_time_s * _WARMUP_SHARE)
    with _timed(phases_s, "timed"):
        optimizer_time, other_work, pauses = OptimizerTime(training.device), OtherWork(), Pauses()
        with optimizer_time.watching(training.optimizer):
            timed = _time(steps, charge, leaks, options)
        others_s = other_work.seconds() + pauses.seconds()
    with _timed(phases_s, "evaluation"):
        evaluations = measure_evaluations(training, task, options, charge)
    peak = charge.peak()
    leak, found = _look_for_leak(steps, leaks, options.trial_time_s * _WARMUP_SHARE)
    if training.loader.options["persistent_workers"] and not steps.feed.has_restarted:
        steps.feed.restart()  # the first start forked them, which no other will
    windows = settled(timed)
    speed, seconds = speed_of(windows, steps.feed), sum(window.seconds for window in windows)
    return Measurement(
        samples_per_s=speed,
        peak=peak,
        parity=parity,
        num_steps=sum(window.num_steps for window in windows),
        num_windows=len(windows),
        loader_wait=min(1.0, sum(window.wait_s for window in windows) / seconds),
        optimizer_share=min(1.0, optimizer_time.seconds() / sum(window.seconds for window in timed)),
        disturbed=min(1.0, max(missing_share(timed), others_s / sum(window.elapsed_s for window in timed))),
        epoch_start_s=steps.feed.epoch_start_s,
        compile_s=steps.compile_time.seconds(),
        leak_bytes_per_step=leak,
        evaluations=evaluations,
        phases_s=phases_s,
        warnings=(*warnings, *found, *_stopped(evaluations, options)),
    )


def _warm_up(steps: Steps, charge: Charge, leaks: LeakWatch, limit_s: float) -> list[str]:
    """Run steps until measuring may begin.

    Every technique has had the steps that it asks for, the loader's prefetched batches are used up, the loss scaler has
    stopped skipping, nothing is compiled, and the peak is stable; or the time for it is over, in which compiling does
    not count. A peak that still grows then is not warned of: it is read after all has run.
    """
    options = steps.training.loader.options
    head_start = 2 * options["num_workers"] * (options["prefetch_factor"] or 0)
    num_left = max(technique.warm_up_steps() for technique in steps.training.settings.techniques())
    peak_bytes, num_calm, began_s = charge.high_water_bytes(), 0, perf_counter()
    first_s = compiled_s = steps.compile_time.seconds()
    while True:
        skipped = steps.step().skipped
        steps.settle()
        leaks.note(steps.num_steps)
        before, peak_bytes = peak_bytes, charge.high_water_bytes()
        compiled_before_s, compiled_s = compiled_s, steps.compile_time.seconds()
        num_left -= 1
        is_calm = not skipped and compiled_s == compiled_before_s and peak_bytes <= before * _STABLE
        num_calm = num_calm + 1 if is_calm else 0
        if num_left > 0:
            continue
        is_full = steps.feed.num_batches >= head_start
        elapsed_s = perf_counter() - began_s - (compiled_s - first_s)
        if not of_first((num_calm >= _CALM_STEPS and is_full) or elapsed_s > limit_s):
            continue
        if elapsed_s <= limit_s or (num_calm >= _CALM_STEPS and is_full):
            return []
        if not is_full:
            needed_s = elapsed_s * head_start / steps.feed.num_batches
            return [_too_short("batches were timed that loader workers had ready: speeds may be too high", needed_s)]
        return [_too_short("the loss scaler still skipped steps while it was timed", 2 * elapsed_s)] if skipped else []


def _stopped(evaluations: Sequence[Evaluated], options: MeasureOptions) -> Iterator[str]:
    """Said of an evaluation that took too long; one that took too much memory is said in other words."""
    most_s = options.evaluation.most_s if options.evaluation is not None else math.inf
    if any(not one.is_whole and one.seconds > most_s for one in evaluations):
        yield (
            "evaluate was stopped before its end, since it takes longer than a quarter of the trial's time: peaks "
            "include it up to there. A longer --trial-time lets it end"
        )


def _too_short(what: str, warm_up_s: float) -> str:
    """What a short warm-up falsified, and a trial time that would do: a power of two, so that trials name the same."""
    trial_time_s = 2 ** math.ceil(math.log2(max(1.0, warm_up_s / _WARMUP_SHARE)))
    return f"{what}; --trial-time {trial_time_s}s would let the training settle first"


def _time(steps: Steps, charge: Charge, leaks: LeakWatch, options: MeasureOptions) -> list[Window]:
    budget = options.budget if options.enforce else None
    charge.sample_descendants()
    over, high_water = charge.exceeds(budget), charge.high_water_bytes()
    gc.collect()

    def at_edge() -> bool:
        nonlocal over, high_water
        leaks.note(steps.num_steps)
        charge.sample_descendants(every_s=1.0)
        before, high_water = high_water, charge.high_water_bytes()
        over = over or (high_water > before and charge.exceeds(budget))
        return over

    windows = time_windows(steps, options, at_edge)
    charge.sample_descendants()
    return windows


def _look_for_leak(steps: Steps, leaks: LeakWatch, limit_s: float) -> tuple[float | None, Sequence[str]]:
    suspected = leaks.suspected(after=NUM_STEPS)
    if suspected is None or world_size() > 1:  # ranks would have to agree on every step that confirms one
        return None, ()
    confirmed = leaks.confirm(steps, max(limit_s, _CONFIRM_S))
    if confirmed is not None:
        return confirmed, ()
    if leaks.is_decided and suspected < _WORTH_SAYING_BYTES:
        return None, ()
    why = "but not on one batch over and over: a dataset that keeps what it has read?"
    if not leaks.is_decided:
        why = "and its steps are too slow to tell a leak from a dataset that caches; a longer --trial-time tells"
    return None, (f"memory grew by about {format_bytes(ceil_mib(round(suspected)))} each step, {why}",)


@contextmanager
def _timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    began_s = perf_counter()
    yield
    phases_s[name] = perf_counter() - began_s
