"""``measure``: runs a training for some steps and measures it."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from torch import nn

from ..internals import lost
from ..plan import Budget
from ..ranks import world_size
from ..task import Task
from ..training.forward.inference import Inference
from ..training.training import Training
from ..units import ceil_mib, format_bytes
from .checks.leak import LeakWatch
from .checks.outputs import latency_of
from .checks.parity import run_parity
from .evaluation import measure_evaluations
from .lengths import longest_batches
from .life.other_phases import measure_last_batch, measure_saving
from .measurement import NUM_STEPS, Evaluated, Measurement, MeasureOptions, Parity
from .memory import Base, Charge, of_others
from .steps import Steps
from .timing.engine import WARMUP_SHARE, Timing, WarmUp
from .timing.moments import OptimizerTime

_CONFIRM_S = 10.0
"""Most seconds for confirming a leak, also in a short trial: after a handful of steps no leak would show."""
_IN_ORDER_SHARE = WARMUP_SHARE / 2
"""Longest training on batches of varying shapes in the job's order before the largest of them is repeated, as a share
of the trial's time."""
_MOST_IN_ORDER = 64
"""Micro-batches of it."""
_WORTH_SAYING_BYTES = 2**20
"""Growth, bytes a step, from which on it is said although the steps are not the cause; smaller growth may be an
allocator that settles."""


def measure(training: Training, task: Task, options: MeasureOptions, base: Base | None = None) -> Measurement:
    """Parity, warm-up, timed windows, evaluation, peaks; in this order, in this process.

    Args:
        training: fresh from :func:`autotune.apply`.
        task: what it was built from.
        options: how long, how precisely, and against what.
        base: what lay in this process before the training was built; None is not known.

    Returns:
        The measurement, without losses where there is no parity run, or where ``parity_last`` or ``to_beat`` leaves it
        to the caller. ``phases_s`` holds ``parity``, ``warmup``, ``timed``, ``evaluation``, ``saving``
        and ``leak``.

    Raises:
        TaskError: the task's ``evaluate`` raised, or changed the model.
        NonFiniteLoss: a loss was NaN or infinite.
        Exception: whatever the user's code raises.
    """
    phases_s: dict[str, float] = {}
    charge = Charge(training.device, options.largest_of, base, options.lengths and options.lengths.how)
    leaks = LeakWatch(charge, training.device.type)

    def note(step: int) -> None:
        charge.first_step_ended()
        leaks.note(step)

    steps = Steps(training, NUM_STEPS, note)
    with _timed(phases_s, "parity"):
        if training.loader.options["num_workers"]:
            steps.feed.open()  # workers are forked from a process as small as a job's
        parity = Parity(losses=())
        if options.parity_batch is not None and not task.infers and not options.parity_last and options.to_beat is None:
            parity = run_parity(training, task, options, note)
    with _timed(phases_s, "warmup"):
        if options.largest_of or options.lengths:
            # the largest first is the best case for CUDA's allocator: the job does not begin with it
            in_order_s = options.trial_time_s * _IN_ORDER_SHARE if charge.is_cuda and options.turns is None else 0.0
            _run_largest(steps, options, in_order_s)
        warm_up = WarmUp(steps, charge, options, _steps_asked(training))
        warnings = _warm_up(steps, warm_up, options)
    phases_s["warmup"] -= warm_up.at_rest_s
    with _timed(phases_s, "timed"):
        gc.collect()
        timing, optimizer_time = Timing(steps, charge, options, warm_up.side), OptimizerTime(training.device)
        num_before = len(training.latencies_s) if isinstance(training, Inference) else 0
        with optimizer_time.watching(training.optimizer):
            is_over = False
            while not is_over:
                steps.step()
                is_over = timing.stepped()
    phases_s["timed"] -= timing.at_rest_s
    is_out = options.is_out(timing.stopped or "time")
    life = None if is_out else options.life
    if life is not None and not (options.largest_of or options.lengths):  # of varying shapes, any batch may be the last
        warnings += measure_last_batch(steps, charge, life)
    with _timed(phases_s, "evaluation"):
        evaluations = measure_evaluations(training, task, options, charge)
    if life is not None:
        with _timed(phases_s, "saving"):
            measure_saving(training, charge, life)
    peak = charge.peak()
    if task.infers:  # of a job that has no phases, the parts that are told are no training's
        peak = peak.model_copy(update={"phases": {}, "binds": None})
    with _timed(phases_s, "leak"):
        is_looked_for = not is_out and options.turns is None  # who takes turns has had a trial
        limit_s = options.trial_time_s * WARMUP_SHARE
        leak, found = _look_for_leak(steps, leaks, limit_s) if is_looked_for else (None, ())
    if training.loader.options["persistent_workers"] and not steps.feed.has_restarted:
        steps.feed.restart()  # the first start forked them, which no other will
    result = timing.result(steps.feed.epoch_start_s / (steps.feed.epoch_samples or math.inf))
    assert result is not None, "it ends with enough windows"
    return Measurement(
        **result,
        peak=peak,
        parity=parity,
        optimizer_share=min(1.0, optimizer_time.seconds() / sum(window.seconds for window in timing.windows)),
        epoch_start_s=steps.feed.epoch_start_s,
        compile_s=steps.compile_time.seconds(),
        graph_breaks=steps.compile_time.graph_breaks(),
        leak_bytes_per_step=leak,
        evaluations=evaluations,
        latency=latency_of(training.latencies_s[num_before:]) if isinstance(training, Inference) else None,
        phases_s=phases_s,
        warnings=(*warnings, *found, *_stopped(evaluations, options), *of_others(), *timing.warnings()),
    )


def _run_largest(steps: Steps, options: MeasureOptions, in_order_s: float) -> None:
    """An optimizer step of the largest micro-batches, after some in the job's order."""
    if options.lengths is None:
        assert options.largest_of is not None, "one of the two is asked for"
        steps.repeat(steps.largest_of(options.largest_of, in_order_s))
    else:
        steps.in_order(_MOST_IN_ORDER, in_order_s)
        for batch, num_samples in longest_batches(steps.training.loader, options.lengths):
            steps.repeat(batch, num_samples)
    steps.settle()


def _steps_asked(training: Training) -> int:
    """Steps that the techniques want before anything is measured."""
    return max(technique.warm_up_steps() for technique in training.settings.techniques())


def _warm_up(steps: Steps, warm_up: WarmUp, options: MeasureOptions) -> list[str]:
    """Run steps until measuring may begin; what is not settled by then, in words."""
    head_start = 2 * steps.num_ahead if options.turns is None else 0  # each turn leaves out those that lay ready
    is_warm = False
    while not is_warm:
        skipped = steps.step().skipped
        is_warm = warm_up.stepped(skipped, is_used_up=steps.feed.num_batches >= head_start)
    if not warm_up.ran_out:
        return []
    if steps.feed.num_batches < head_start:
        needed_s = warm_up.seconds * head_start / steps.feed.num_batches
        return [_too_short("batches were timed that loader workers had ready: speeds may be too high", needed_s)]
    return (
        [_too_short("the loss scaler still skipped steps while it was timed", 2 * warm_up.seconds)] if skipped else []
    )


def _stopped(evaluations: Sequence[Evaluated], options: MeasureOptions) -> Iterator[str]:
    """Said of an evaluation that took too long, or could not be watched; one that took too much memory is said in other
    words."""
    if options.evaluation is not None and (reason := lost("evaluation")) is not None:
        yield f"the evaluation is not measured: {reason}"
    most_s = options.evaluation.most_s if options.evaluation is not None else math.inf
    for one in evaluations[:1]:
        yield from _piles_up(one, options.budget)
    if any(not one.is_whole and one.seconds > most_s and one.growth is None for one in evaluations):
        yield (
            "evaluate was stopped before its end, since it takes longer than a quarter of the trial's time: peaks "
            "include it up to there. A longer --trial-time lets it end"
        )


def _piles_up(one: Evaluated, budget: Budget | None) -> Iterator[str]:
    """Said of an evaluation that leaves something behind, or in which something piles up for nobody knows how long."""
    limit = None if budget is None else budget.of_device
    room = math.inf if budget is None or limit is None else limit / budget.factor - one.needed_bytes
    if one.kept_bytes is not None:
        more = "" if room == math.inf else f": memory runs out after about {max(0, int(room / one.kept_bytes)):,} more"
        yield (
            f"each evaluation leaves about {format_bytes(ceil_mib(one.kept_bytes))} behind, and the next adds to it"
            f"{more}. A list that is never cleared is the usual cause"
        )
    growth = one.growth
    if growth is not None and not one.is_whole and growth.all_batches is None:
        lasts = "" if room == math.inf else f"; memory runs out after about {growth.lasts(room + growth.seen_bytes):,}"
        yield (
            f"evaluate gains about {format_bytes(ceil_mib(round(growth.bytes_per_batch)))} with each batch, and how "
            f"many there are is not known: it was stopped after {growth.num_batches}{lasts}"
        )


def _too_short(what: str, warm_up_s: float) -> str:
    """What a short warm-up falsified, and a trial time that would do: a power of two, so that trials name the same."""
    trial_time_s = 2 ** math.ceil(math.log2(max(1.0, warm_up_s / WARMUP_SHARE)))
    return f"{what}; --trial-time {trial_time_s}s would let the training settle first"


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


def as_in_a_plain_loop(task: Task) -> Task:
    """The task with each loss kept until the next one exists, as ``loss = compute_loss(model, batch)`` keeps it.

    The loss keeps the nodes of its graph, thousands of small objects, while the next forward makes its own. On glibc
    they lie in the holes that tensors have left, and keep those from merging: a transformers GPT-2 takes 13 % more
    (``python -m benchmarks.honesty --reference``). ``Training.step`` frees them.
    """
    return dataclasses.replace(task, compute_loss=_Keeping(task.compute_loss))


class _Keeping:
    def __init__(self, compute_loss: Any) -> None:
        self._compute_loss = compute_loss
        self._loss: Any = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self._loss = self._compute_loss(model, batch)
        return self._loss
