"""From repeated measurements to what a plan states: values, intervals, and whether they are sure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from scipy.special import chdtri, stdtrit

from ...measure import Measurement
from ...measure.timing.turns import FEWEST_TURNS, trimmed_mean
from ...plan import Budget, Evidence, Gain, Latency, Peak, PhaseName, PhasePeak, Speed
from ...units import ceil_mib
from ...workers.outcome import DISTURBED, Turn
from .by_turns import MOST_ROUNDS_BY_TURNS

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
_CLOSE = math.log(1.03)
"""Half the width of the 95 % interval of a gain's logarithm, with which turns may end."""

_BETWEEN, _FREEDOM = 0.015, 3
"""Standard deviation of a ratio from one pair of processes to the next, and how many pairs that weighs as much as."""
_FEW = 3
"""Pairs from which on their own scatter may contradict it."""
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
    """One round: the winner and the reference in fresh interpreters, by turns or one right after the other."""

    winner: Measurement
    reference: Measurement | None = None
    """None where the reference is the winner, or did not run to its end."""
    turns: tuple[Turn, ...] = ()
    """That they took; none where one ran after the other."""

    @property
    def counted(self) -> tuple[Turn, ...]:
        """The turns that count: the undisturbed ones, or all where those are too few."""
        found = tuple(turn for turn in self.turns if turn.disturbed <= DISTURBED)
        return found if len(found) >= FEWEST_TURNS else self.turns

    @property
    def log_ratio(self) -> float | None:
        """Natural logarithm of the winner's speed over the reference's; of turns, their trimmed mean."""
        if self.turns:
            return trimmed_mean([turn.log_ratio for turn in self.counted])[0]
        if self.reference is None:
            return None
        return math.log(self.winner.samples_per_s.value / self.reference.samples_per_s.value)

    @property
    def disturbed(self) -> float:
        """Share of the time that other work took, of the more disturbed of the two runs; of turns, their mean."""
        if self.turns:
            return statistics.fmean(turn.disturbed for turn in self.counted)
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


def gain_of(rounds: Sequence[Pair]) -> Interval | None:
    """The logarithm of the winner's speed over the reference's, over the rounds that have one; None where none has.

    Rounds by turns know their ratio each. How far two processes of one configuration differ from another two is judged
    by the rounds together with :data:`_BETWEEN`, since two rounds alone tell next to nothing of it.
    """
    found = [pair for pair in rounds if pair.log_ratio is not None]
    ratios = [pair.log_ratio or 0.0 for pair in found]
    if not ratios:
        return None
    if not all(pair.turns for pair in found):
        return interval(ratios)
    return _pooled(ratios, [_error_within(pair) for pair in found])


def _num_ratios(rounds: Sequence[Pair]) -> int:
    return sum(pair.log_ratio is not None for pair in rounds)


def _error_within(pair: Pair) -> float:
    """Standard error of a round's ratio, by its turns."""
    return trimmed_mean([turn.log_ratio for turn in pair.counted])[1]


def _pooled(values: Sequence[float], errors: Sequence[float]) -> Interval:
    """The mean of some processes' values, whose scatter is pooled with what is known of processes; where three or more
    contradict that at 95 %, it is theirs alone.

    Source: the posterior of a normal mean under a scaled inverse chi-squared prior of its variance, Gelman et al.,
    Bayesian Data Analysis, 3rd ed., 3.3.
    """
    number, center = len(values), statistics.fmean(values)
    own = sum((value - center) ** 2 for value in values)
    is_known = number < _FEW or own <= _BETWEEN**2 * float(chdtri(number - 1, 0.05))
    scatter, freedom = own + is_known * _FREEDOM * _BETWEEN**2, is_known * _FREEDOM + number - 1
    within = statistics.fmean(error**2 for error in errors)
    error = math.sqrt(max(scatter / freedom, within) / number)
    half = float(stdtrit(freedom, 0.975)) * error
    return Interval(center, error, center - half, center + half)


def _quantile(number: int) -> float:
    """Half the width of so many pairs' 95 % interval, in standard errors, where their scatter is pooled."""
    return float(stdtrit(_FREEDOM + number - 1, 0.975))


def calm(rounds: Sequence[Pair]) -> list[Pair]:
    """The rounds that other work did not disturb."""
    return [pair for pair in rounds if pair.disturbed <= DISTURBED]


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
    by_turns = all(pair.turns for pair in pairs)
    known = _pooled_speed(speeds) if by_turns else interval(speeds, statistics.median(speeds))
    is_known = known.error <= _KNOWN * known.value
    return is_known and _is_decided(pairs) and _has_room([pair.winner.peak.process for pair in pairs], budget)


def _is_decided(pairs: Sequence[Pair]) -> bool:
    """Whether a gain is proven, or ruled out; by turns also whether it is known closely, or would not be after as many
    rounds as there may be. One ratio tells neither."""
    found = gain_of(pairs)
    if found is None:
        return True
    if (number := _num_ratios(pairs)) < 2:
        return False
    half = (found.high - found.low) / 2
    if any(pair.turns for pair in pairs) and half > _CLOSE:
        at_best = half * math.sqrt(number / MOST_ROUNDS_BY_TURNS) * _quantile(MOST_ROUNDS_BY_TURNS) / _quantile(number)
        if at_best <= _CLOSE:
            return False
    return found.low > 0 or found.high < _WORTH


def _has_room(peaks: Sequence[int], budget: Budget) -> bool:
    """Whether another process would be within the limit, by these: that is what the margin is for."""
    needed = Peak(process=max(peaks), spread=max(peaks) - min(peaks)).next_bytes(0.0)
    limit = budget.of_device
    return limit is None or budget.as_it_stands is not None or needed <= limit


def combine(
    repeats: Sequence[Measurement], budget: Budget, disturbed: Sequence[Measurement] = (), by_turns: bool = False
) -> Evidence:
    """One configuration's repeats as evidence.

    Speed is the mean of the repeats, or their median where one is off; its 95 % interval is the wider, at either end,
    of Student's over the repeats and of the mean of the intervals within them (which see a drift that a few repeats may
    miss). Peak is the largest, in whole MiB, rounded up.

    Args:
        repeats: one measurement for each fresh process, at least one.
        budget: what the largest peak is held against.
        disturbed: other runs, whose speeds do not count; their peaks do.
        by_turns: whether they took turns with the reference: their scatter is pooled as in :func:`gain_of`.
    """
    speeds = [repeat.samples_per_s for repeat in repeats]
    values = [speed.value for speed in speeds]
    over = _pooled_speed(values) if by_turns else interval(values, statistics.median(values))
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
            spread=_spread(peaks),
            reserved=_largest([peak.reserved for peak in peaks]),
            allocated=_largest([peak.allocated for peak in peaks]),
            host=_largest([peak.host for peak in peaks]),
            workers=_largest([peak.workers for peak in peaks]),
            allocator_retries=max(peak.allocator_retries for peak in peaks),
            above_base=_largest([peak.above_base for peak in peaks]),
            largest_of=peaks[0].largest_of,
            longest=peaks[0].longest,
        ).with_phases(_phases(peaks)),
        compile_s=_rounded(compile_s) if compile_s else None,
        latency=(latency := _latency(repeats)),
        fits=all(budget.over(peak) is None for peak in peaks) and not (latency and latency.exceeds(budget)),
    )


def _latency(repeats: Sequence[Measurement]) -> Latency | None:
    """The largest of the repeats."""
    found = [one.latency for one in repeats if one.latency is not None]
    if not found:
        return None
    median_s, p95_s = (
        _rounded(max(values)) for values in zip(*((one.median_s, one.p95_s) for one in found), strict=True)
    )
    return Latency(median_s=median_s, p95_s=p95_s)


def _spread(peaks: Sequence[Peak]) -> int | None:
    """Between repeats that had the same phases as the largest, in whole MiB, rounded up."""
    most = max(peaks, key=lambda peak: peak.process)
    least = min(peak.process for peak in peaks if peak.phases.keys() == most.phases.keys())
    return ceil_mib(most.process - least) or None


def _phases(peaks: Sequence[Peak]) -> dict[PhaseName, PhasePeak]:
    """Of each phase, the largest of the repeats that measured it."""
    found: dict[PhaseName, PhasePeak] = {}
    for name in get_args(PhaseName):
        rows = [peak.phases[name] for peak in peaks if name in peak.phases]
        if rows:
            largest = max(rows, key=lambda row: row.process)
            sizes = {key: ceil_mib(value) for key, value in largest if value is not None}
            found[name] = PhasePeak(**sizes)
    return found


def _pooled_speed(values: Sequence[float]) -> Interval:
    found = _pooled([math.log(value) for value in values], [0.0])
    center = math.exp(found.value)
    return Interval(center, center * found.error, math.exp(found.low), math.exp(found.high))


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
    found = gain_of(pairs)
    if found is None:
        return Gain(speed=round(measured.samples_per_s.value / reference.samples_per_s.value, 3), memory=memory)
    speed, low, high = (round(math.exp(min(value, _LARGEST)), 3) for value in (found.value, found.low, found.high))
    if (rounds := _num_ratios(pairs)) < 2:
        return Gain(speed=speed, memory=memory)
    turns = sum(len(pair.counted) for pair in pairs)
    return Gain(speed=speed, low=low, high=high, rounds=rounds, turns=turns or None, memory=memory)


def _largest(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return ceil_mib(max(known)) if known else None


def _rounded(value: float) -> float:
    """Five significant digits: more would be noise."""
    return float(f"{value:.{_DIGITS}g}")
