"""From repeated measurements to what a plan states."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..measure import Measurement
from ..plan import Budget, Evidence, Gain, Peak, Speed
from ..units import ceil_mib

__all__ = ["combine", "gain"]

_T_975 = {2: 12.706, 3: 4.303}
"""Student's t at 97.5 % by number of repeats."""

_DIGITS = 5


def combine(repeats: Sequence[Measurement], budget: Budget) -> Evidence:
    """One configuration's repeats as evidence.

    Speed is the mean of the repeats; its 95 % interval is the wider, at either end, of Student's t over the repeats and
    of the mean of the intervals within them (which see a drift that three repeats may miss). Peak is the largest, in
    whole MiB, rounded up.

    Args:
        repeats: one measurement for each fresh process, one to three.
        budget: what the largest peak is held against.
    """
    speeds = [repeat.samples_per_s for repeat in repeats]
    value = statistics.fmean(speed.value for speed in speeds)
    half = 0.0
    if len(speeds) > 1:
        t = _T_975[len(speeds)]
        half = t * statistics.stdev(speed.value for speed in speeds) / math.sqrt(len(speeds))
    low = min(value - half, statistics.fmean(speed.low for speed in speeds))
    high = max(value + half, statistics.fmean(speed.high for speed in speeds))
    peaks = [repeat.peak for repeat in repeats]
    return Evidence(
        samples_per_s=Speed(
            value=_rounded(value), low=_rounded(max(low, 0.0)), high=_rounded(high), repeats=len(repeats)
        ),
        peak=Peak(
            process=ceil_mib(max(peak.process for peak in peaks)),
            reserved=_largest([peak.reserved for peak in peaks]),
            allocated=_largest([peak.allocated for peak in peaks]),
            host=_largest([peak.host for peak in peaks]),
            allocator_retries=max(peak.allocator_retries for peak in peaks),
            largest_of=peaks[0].largest_of,
        ),
        fits=all(budget.holds(peak.process) for peak in peaks),
    )


def gain(measured: Evidence, reference: Evidence | None, reason: str | None) -> Gain:
    """The plan against the reference; null with a reason where the reference was not measured."""
    if reference is None:
        return Gain(speed=None, memory=None, reason=reason)
    return Gain(
        speed=round(measured.samples_per_s.value / reference.samples_per_s.value, 3),
        memory=round(measured.peak.process / reference.peak.process, 3),
    )


def _largest(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return ceil_mib(max(known)) if known else None


def _rounded(value: float) -> float:
    """Five significant digits: more would be noise."""
    return float(f"{value:.{_DIGITS}g}")
