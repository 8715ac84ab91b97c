"""From repeated measurements to what a plan states: values, intervals, and whether they are sure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from ...measure import Measurement
from ...plan import Budget, Evidence, Gain, Peak, Speed
from ...units import ceil_mib

__all__ = ["Interval", "Pair", "are_sure", "calm", "combine", "gain", "interval", "undisturbed"]

_DISTURBED = 0.05
"""Share of a run's time from which on, if other work took it, the run is measured again."""
_MANY_ROUNDS = 3
"""Rounds from which on other work in all but one of them counts as the machine's usual state."""
_OFF = 0.05
"""Relative distance from the median from which on a value may be an outlier."""
_OFF_DEVIATIONS = 3.0
"""The same in robust standard deviations; an outlier exceeds both."""
_NORMAL_MAD = 1.4826
"""Standard deviation of a normal variable over its median absolute deviation."""
_KNOWN = 0.02
"""Relative standard error of the mean speed up to which it is sure. Two runs may lie 4 % apart."""
_WORTH = math.log(1.02)
"""Logarithm of the smallest speed ratio that counts as a gain. Where more is ruled out, rounds end."""
_ROOM = 2.0
"""Peaks are sure where the largest, plus so many times their range, is within the limit: that is what the margin is
for."""

_LARGEST = 20.0
"""Logarithm of the largest ratio that is stated, since an interval over two scattered rounds has no end."""
_DIGITS = 5


@dataclass(frozen=True)
class Interval:
    """A value with its standard error and its 95 % interval."""

    value: float
    error: float
    low: float
    high: float


@dataclass(frozen=True)
class Pair:
    """One round: the winner and, right after it, the reference, in fresh interpreters."""

    winner: Measurement
    reference: Measurement | None = None
    """None where the reference is the winner, or did not run to its end."""

    @property
    def log_ratio(self) -> float | None:
        """Natural logarithm of the winner's speed over the reference's."""
        if self.reference is None:
            return None
        return math.log(self.winner.samples_per_s.value / self.reference.samples_per_s.value)

    @property
    def disturbed(self) -> float:
        """Share of the time that other work took, of the more disturbed of the two runs."""
        return max(self.winner.disturbed, self.reference.disturbed if self.reference else 0.0)


def interval(values: Sequence[float], scale: float = 1.0) -> Interval:
    """The mean with Student's 95 % interval. Where one of at least four values is an outlier, the median, with the
    interval's width from the others.

    Args:
        values: independent, at least one; a single value has no width.
        scale: what a relative distance is taken of.

    Source: off by the median absolute deviation, Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers.
    """
    median = statistics.median(values)
    robust = _NORMAL_MAD * statistics.median(abs(value - median) for value in values)
    *others, farthest = sorted(values, key=lambda value: abs(value - median))
    is_off = len(others) >= 3 and abs(farthest - median) > max(_OFF * scale, _OFF_DEVIATIONS * robust)
    center, kept = (median, others) if is_off else (statistics.fmean(values), values)
    if len(kept) == 1:
        return Interval(center, 0.0, center, center)
    error = statistics.stdev(kept) / math.sqrt(len(kept))
    half = float(stdtrit(len(kept) - 1, 0.975)) * error
    return Interval(center, error, center - half, center + half)


def calm(rounds: Sequence[Pair]) -> list[Pair]:
    """The rounds that other work did not disturb."""
    return [pair for pair in rounds if pair.disturbed <= _DISTURBED]


def undisturbed(rounds: Sequence[Pair]) -> list[Pair]:
    """The rounds that count: the calm ones, or all where fewer than two are calm."""
    found = calm(rounds)
    return found if len(found) >= 2 else list(rounds)


def are_sure(rounds: Sequence[Pair], budget: Budget) -> bool:
    """Whether more rounds would tell nothing new: the winner's speed is known, it is known to be faster than the
    reference or not, and its peaks leave room below the limit.

    Disturbed rounds do not count. Where fewer than two of three or more are calm, all count: the machine is always so.

    Args:
        rounds: all so far.
        budget: what the winner's peaks are held against.
    """
    pairs = undisturbed(rounds) if len(rounds) >= _MANY_ROUNDS else calm(rounds)
    if len(pairs) < 2:
        return False
    speeds = [pair.winner.samples_per_s.value for pair in pairs]
    known = interval(speeds, statistics.median(speeds))
    is_known = known.error <= _KNOWN * known.value
    ratios = [ratio for pair in pairs if (ratio := pair.log_ratio) is not None]
    return is_known and _is_decided(ratios) and _has_room([pair.winner.peak.process for pair in pairs], budget)


def _is_decided(log_ratios: Sequence[float]) -> bool:
    """Whether a gain is proven, or ruled out; one ratio tells neither."""
    if len(log_ratios) < 2:
        return not log_ratios
    found = interval(log_ratios)
    return found.low > 0 or found.high < _WORTH


def _has_room(peaks: Sequence[int], budget: Budget) -> bool:
    return budget.limit is None or max(peaks) + _ROOM * (max(peaks) - min(peaks)) <= budget.limit


def combine(repeats: Sequence[Measurement], budget: Budget, disturbed: Sequence[Measurement] = ()) -> Evidence:
    """One configuration's repeats as evidence.

    Speed is the mean of the repeats, or their median where one is off; its 95 % interval is the wider, at either end,
    of Student's over the repeats and of the mean of the intervals within them (which see a drift that a few repeats may
    miss). Peak is the largest, in whole MiB, rounded up.

    Args:
        repeats: one measurement for each fresh process, at least one.
        budget: what the largest peak is held against.
        disturbed: other runs, whose speeds do not count; their peaks do.
    """
    speeds = [repeat.samples_per_s for repeat in repeats]
    values = [speed.value for speed in speeds]
    over = interval(values, statistics.median(values))
    low = min(over.low, over.value * statistics.fmean(speed.low / speed.value for speed in speeds))
    high = max(over.high, over.value * statistics.fmean(speed.high / speed.value for speed in speeds))
    peaks = [repeat.peak for repeat in (*repeats, *disturbed)]
    compile_s = statistics.median(repeat.compile_s for repeat in repeats)
    return Evidence(
        samples_per_s=Speed(
            value=_rounded(over.value), low=_rounded(max(low, 0.0)), high=_rounded(high), repeats=len(repeats)
        ),
        peak=Peak(
            process=ceil_mib(max(peak.process for peak in peaks)),
            reserved=_largest([peak.reserved for peak in peaks]),
            allocated=_largest([peak.allocated for peak in peaks]),
            host=_largest([peak.host for peak in peaks]),
            allocator_retries=max(peak.allocator_retries for peak in peaks),
            largest_of=peaks[0].largest_of,
        ),
        compile_s=_rounded(compile_s) if compile_s else None,
        fits=all(budget.holds(peak.process) for peak in peaks),
    )


def gain(measured: Evidence, reference: Evidence | None, pairs: Sequence[Pair], reason: str | None) -> Gain:
    """The plan against the reference: by the ratios of its rounds, where there are any.

    Args:
        measured: the plan's evidence.
        reference: the reference's; None gives no gain.
        pairs: the rounds; empty where the plan is the reference, or nothing was repeated.
        reason: why there is no reference.
    """
    if reference is None:
        return Gain(speed=None, memory=None, reason=reason)
    memory = round(measured.peak.process / reference.peak.process, 3)
    ratios = [ratio for pair in pairs if (ratio := pair.log_ratio) is not None]
    if not ratios:
        return Gain(speed=round(measured.samples_per_s.value / reference.samples_per_s.value, 3), memory=memory)
    found = interval(ratios)
    speed, low, high = (round(math.exp(min(value, _LARGEST)), 3) for value in (found.value, found.low, found.high))
    if len(ratios) == 1:
        return Gain(speed=speed, memory=memory)
    return Gain(speed=speed, low=low, high=high, rounds=len(ratios), memory=memory)


def _largest(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return ceil_mib(max(known)) if known else None


def _rounded(value: float) -> float:
    """Five significant digits: more would be noise."""
    return float(f"{value:.{_DIGITS}g}")
