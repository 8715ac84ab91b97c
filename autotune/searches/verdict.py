"""The verdict on an outcome: whether the configuration may be used, why not, and what the sampler is told. Quality is
compared with the reference's: is what a configuration that computes another function loses within the allowed drop?"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from ..measure import Measurement
from ..measure.measurement import Quality
from ..plan import Budget, Excess, Latency, Peak, PhaseName
from ..units import ceil_mib, format_bytes, format_latency
from ..words import PHASES, count, growth_words
from ..workers import (
    Chosen,
    Compared,
    Crashed,
    CutsJudged,
    Dropped,
    Estimated,
    Exported,
    Failed,
    Inspected,
    Lost,
    Measured,
    NonFinite,
    Outcome,
    OutOfMemory,
    Predicted,
    Profiled,
    TimedOut,
)
from .options import Drop
from .store.observations import Observation
from .time_budget import MOST_ROUNDS
from .winner.proof import FAR, Pairs, chance, difference_of, judge_quality, look

CONSTRAINTS = ("failure", "leak", "memory", "parity", "quality")
"""Names of the constraints. Every trial gets all of them in this order: Optuna's GPSampler raises where one is missing.
They are alphabetical, since SQLite gives them back in that order."""

_BOUND = 5.0
"""Log ratios are clipped to +-5, so that no constraint's scale dominates."""
_LEAST = 0.1
"""Least violation where how large it is is not known: of a trial that ran out of memory, or was given up early."""
_Z = 1.96
"""Standard errors on either side in a 95 % interval."""
_UNKNOWN = 0.0
"""A constraint that an outcome says nothing about: neither violated nor satisfied with room."""
_RULED_OUT = 3.0
"""Standard errors of the evaluation that a quarter of the recovery may leave, beside :data:`_EARLY`."""
_EARLY = 10.0
"""Allowed drops that a quarter of the recovery may leave."""
_TINY = 1e-12
"""Instead of an allowed drop of nothing."""

SPOILED = 0.2
"""Share of a run's time that other work took from which on its speed does not count."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one outcome."""

    feasible: bool
    """Whether it fits the budget, keeps parity, does not leak, and its quality is not known to be too low."""
    reason: str | None
    """Why it is infeasible, in words; None where it is feasible."""
    over_memory: bool
    """Whether it ran out of memory or over a budget."""
    log_speed: float | None
    """Natural logarithm of samples per second; None where it was not measured."""
    constraints: tuple[float, ...]
    """One for each of :data:`CONSTRAINTS`, feasible where <= 0."""
    lost: tuple[float, float] | None = None
    """Drop in quality over the allowed one, and its standard error; None where it was not judged."""
    of_host: bool = False
    """Whether it is only the host's memory that it takes too much of, on a machine whose device has its own."""


def is_spoiled(outcome: Outcome) -> bool:
    """Whether other work, or a pause of the machine, took too much of a run's time for its speed to count."""
    return isinstance(outcome, Measured) and outcome.measurement.disturbed >= SPOILED


def judge(
    outcome: Outcome,
    budget: Budget,
    device_memory_bytes: int,
    reference: Quality | None = None,
    drop: Drop | None = None,
) -> Verdict:
    """Judge an outcome by the budget, and its quality by the reference's.

    Args:
        outcome: of a measure request.
        budget: the limit and its margin.
        device_memory_bytes: what an out-of-memory trial is compared with where there is no limit.
        reference: the reference's quality; None where it was not measured, or this is the reference.
        drop: how far quality may fall.
    """
    match outcome:
        case Measured(measurement=measurement):
            return _judge_measurement(measurement, budget, reference, drop)
        case OutOfMemory():
            limit = (budget.host if outcome.of_host else budget.of_device) or device_memory_bytes
            violation = max(_log_ratio(outcome.peak_bytes * budget.factor, limit), _LEAST)
            reason = f"out of memory at {format_bytes(ceil_mib(outcome.peak_bytes))}: {outcome.message}"
            constraints = (-1.0, _UNKNOWN, violation, _UNKNOWN, _UNKNOWN)
            return Verdict(False, reason, True, None, constraints, of_host=outcome.of_host)
        case NonFinite():
            return Verdict(False, f"the loss was not finite at step {outcome.step}", False, None, _failure())
        case TimedOut():
            return Verdict(False, f"did not end within {outcome.deadline_s:.0f} s", False, None, _failure())
        case Crashed() | Failed():
            return Verdict(False, outcome.message, False, None, _failure())
        case Dropped():
            return Verdict(False, outcome.message, False, None, (-1.0, _UNKNOWN, _UNKNOWN, _UNKNOWN, 1.0))
        case (
            Inspected()
            | Chosen()
            | Compared()
            | Predicted()
            | CutsJudged()
            | Profiled()
            | Estimated()
            | Exported()
            | Lost()
        ):
            raise AssertionError(f"no answer to a measure request: {outcome.kind}")


def _judge_measurement(
    measurement: Measurement, budget: Budget, reference: Quality | None, drop: Drop | None
) -> Verdict:
    peak, parity, over = measurement.peak.process, measurement.parity, budget.over(measurement.peak)
    of_host = over is not None and budget.holds(peak)
    reasons = []
    if over is not None:
        reasons.append(f"{over_words(over)}{'' if of_host else _where(measurement, budget)}")
    if parity.strayed_at is not None:
        reasons.append(f"strays from the reference's loss at step {parity.strayed_at} (by {parity.deviation:.1%})")
    if parity.unlike is not None:
        reasons.append(parity.unlike)
    is_slow = measurement.latency is not None and measurement.latency.exceeds(budget)
    if measurement.latency is not None and is_slow:
        reasons.append(latency_words(measurement.latency, budget))
    if measurement.leak_bytes_per_step is not None:
        leak = format_bytes(ceil_mib(round(measurement.leak_bytes_per_step)))
        reasons.append(f"leaks about {leak} each step")
    has_dropped, lost, quality = False, None, -1.0
    if measurement.quality is not None and reference is not None and drop is not None:
        pairs = [(measurement.quality, reference)]
        lost = lost_share(measurement.quality, reference, drop)
        has_dropped = judge_quality(pairs, drop) == "dropped"
        beyond = math.asinh(lost[0]) - math.asinh(1.0)
        quality = max(beyond, _LEAST) if has_dropped else min(beyond, _UNKNOWN)
        if has_dropped:
            reasons.append(reason_of(pairs, drop))
    constraints = (
        -1.0,
        -1.0 if measurement.leak_bytes_per_step is None else 1.0,
        _memory(measurement.peak, budget, over),
        1.0 if parity.is_other_training or is_slow else -1.0,
        max(-_BOUND, min(_BOUND, quality)),
    )
    log_speed = math.log(measurement.samples_per_s.value)
    reason = "; ".join(reasons) or None
    return Verdict(reason is None, reason, over is not None, log_speed, constraints, lost, of_host)


def over_words(over: Excess) -> str:
    """``over the budget by 12 MiB, margin included``."""
    return f"over {over.budget} by {format_bytes(ceil_mib(over.num_bytes))}, margin included"


def latency_words(latency: Latency, budget: Budget) -> str:
    """``over the latency of 20 ms: 95 of 100 batches take up to 31 ms``."""
    limit = format_latency(budget.latency_s or 0.0)
    return f"over the latency of {limit}: 95 of 100 batches take up to {format_latency(latency.p95_s)}"


def _memory(peak: Peak, budget: Budget, over: Excess | None) -> float:
    """The constraint: the logarithm of the peak over its limit, of the budget that is exceeded most."""
    if over is not None:
        return max(-_BOUND, min(_BOUND, math.log(over.ratio)))
    return _log_ratio(peak.process * budget.factor, budget.of_device) if budget.of_device else -1.0


def _where(measurement: Measurement, budget: Budget) -> str:
    """In which phase of the job's life it is over the budget, and when; empty where its training is."""
    known: PhaseName = "evaluation" if budget.holds(measurement.training_bytes) else "training"
    phase = measurement.peak.binds or known
    if phase == "training":
        return ""
    growth = measurement.evaluations[0].growth if phase == "evaluation" and measurement.evaluations else None
    when = growth_words(growth, budget) if growth is not None else ""
    return f", in {PHASES[phase]}{f', {when}' if when else ''}"


def _failure() -> tuple[float, ...]:
    return (1.0, _UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN)


def _log_ratio(value: float, limit: float) -> float:
    """Clipped logarithm of ``value`` over ``limit``; positive exactly where ``value > limit``."""
    return max(-_BOUND, min(_BOUND, math.log(max(value, 1.0) / limit)))


def observation(outcome: Outcome, verdict: Verdict) -> Observation:
    """What this package's own sampler learns from a trial."""
    seconds = outcome.seconds or None
    if isinstance(outcome, OutOfMemory) and not verdict.of_host:
        return Observation("out of memory", peak_bytes=outcome.peak_bytes, seconds=seconds)
    if not isinstance(outcome, Measured):
        return Observation("dropped" if isinstance(outcome, Dropped) else "failed", seconds=seconds)
    speed, peak = outcome.measurement.samples_per_s, outcome.measurement.peak.process
    told = dict(zip(CONSTRAINTS, verdict.constraints, strict=True))
    is_sound = not verdict.of_host and all(told[name] <= 0 for name in CONSTRAINTS if name not in ("memory", "quality"))
    lost, lost_error = verdict.lost or (None, 0.0)
    return Observation(
        "failed" if not is_sound else "dropped" if told["quality"] > 0 else "measured",
        log_speed=verdict.log_speed,
        relative_error=(speed.high - speed.low) / (2 * _Z * speed.value),
        peak_bytes=peak,
        fits=told["memory"] <= 0,
        seconds=seconds,
        lost=lost,
        lost_error=lost_error,
    )


def lost_share(one: Quality, reference: Quality, drop: Drop) -> tuple[float, float]:
    """The drop in quality over the allowed one, and its standard error over examples: 0 where none is known.

    What was given up after a quarter of the training is compared with the reference at that point, and has lost too
    much in any case.
    """
    allowed = max(drop.of(reference.value), _TINY)
    error = math.sqrt(difference_of([(one, reference)], allowed).examples) / allowed
    if one.is_whole or reference.early is None:
        return (reference.value - one.value) / allowed, error
    return max((reference.early - one.value) / allowed, 1 + FAR), error


def reason_of(pairs: Pairs, drop: Drop) -> str:
    """Both qualities and the allowed drop, in words."""
    value = statistics.fmean(one.value for one, _ in pairs)
    reference = statistics.fmean(other.value for _, other in pairs)
    early = "" if all(one.is_whole for one, _ in pairs) else " after a quarter of the recovery"
    return f"its quality is {value:.4g}{early}, the reference's {reference:.4g}, and {drop} less is allowed"


def why_not(pairs: Pairs, drop: Drop) -> str:
    """Both qualities and the allowed drop, with what is against a proof by more seeds, in words."""
    said, seeds = reason_of(pairs, drop), count(len(pairs), "seed")
    match look(pairs, drop):
        case "unknown":
            return f"{said}: too few or too unlike to tell, after {seeds}"
        case "futile":
            likely = f"{chance(pairs, drop):.1%}"
            return f"{said}: after {seeds}, the chance that it is proven by {MOST_ROUNDS} is {likely}"
    return said


def least_early(reference: Quality, drop: Drop) -> float | None:
    """The least quality after a quarter of the training that is worth going on with: the reference's at that point,
    less twice what the reference still gains, ten of the allowed drops, and three standard errors of the evaluation.
    What has been pruned gains more than the reference, which has been trained: a CNN with half of its widths was 1 to 6
    points behind after 10 steps of 100, and none in the end."""
    if reference.early is None:
        return None
    gains = max(reference.value - reference.early, 0.0)
    return reference.early - 2 * gains - _EARLY * drop.of(reference.value) - _RULED_OUT * reference.error
