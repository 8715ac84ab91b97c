"""Speed: the throughput of consecutive windows of whole optimizer steps, and when they are enough of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from ...plan import Speed
from ..measurement import MeasureOptions, Stopped
from .interval import confidence_interval

FEWEST_WINDOWS = 3
_ENOUGH_WINDOWS = 8
_NEXT_LOOK = 1.25
_SLOWER = 0.98
"""Share of the speed to beat below which the interval has to be."""
_SURER, _SURER_S = 0.9, 3.0
"""An interval is no surer that is wider than this share of what it was at half as many windows; after so many seconds.
"""
_REASONS: tuple[Stopped, ...] = ("precise", "slower", "no_surer")
_CALM = 0.05
"""A window of which other work took less than this share is a calm one."""
_CALM_PART = 0.1
"""Least share of the time that calm windows have to hold, to stand for all."""


@dataclass(frozen=True)
class Window:
    """Some whole optimizer steps. Epoch starts and compiling are left out."""

    seconds: float
    """Wall time, until the device has done them."""
    num_samples: int
    """Samples consumed."""
    num_steps: int
    """Optimizer steps."""
    wait_s: float
    """Seconds of it in which the device did nothing, since data had to be waited for."""
    elapsed_s: float
    """Wall time of the host, with epoch starts and compiling."""
    cpu_s: float
    """Processor time of this process meanwhile, all of its threads."""
    others_s: float = 0.0
    """Of the wall time, what other work on the machine took, or a pause of it."""


class StoppingRule:
    """When windows are enough. The interval is looked at rarely (after 8 windows, then a quarter more each time), since
    meanwhile loader workers get ahead. What it says must hold twice running, since one look among many finds it so by
    chance. It is narrow enough by the calm windows alone: where other work comes in bursts, a run lasts until the calm
    part is known.

    With a speed to beat, a run also ends where it is surely slower, also if nothing had been taken from it; where it
    may be unsure, also where its interval is hardly narrower than it was at half as many windows."""

    def __init__(self, options: MeasureOptions, comparable: Callable[[Sequence[Window]], Sequence[Window]]) -> None:
        """The time runs from here; ``comparable`` tells the windows that can be compared, none while they are few."""
        self._options, self._comparable = options, comparable
        self._next_look = _ENOUGH_WINDOWS if options.to_beat is None else FEWEST_WINDOWS + 1
        self._num_running: Counter[Stopped] = Counter()
        self._began_s = perf_counter()

    def reason(
        self, num_windows: int, windows: Callable[[], Sequence[Window]], is_over: bool, is_stable: bool
    ) -> Stopped | None:
        """Asked after each window.

        Args:
            num_windows: so far.
            windows: all of them.
            is_over: the peak is over the budget: the fewest windows are enough.
            is_stable: the peak has not grown lately; a race is not ended before.

        Returns:
            What ends the run here; None where it goes on.
        """
        elapsed_s = perf_counter() - self._began_s
        if (is_over or elapsed_s >= self._options.trial_time_s) and num_windows >= FEWEST_WINDOWS:
            is_slower = "slower" in self._found(windows(), elapsed_s)
            return "over" if is_over else "slower" if is_slower else "time"
        if num_windows >= self._next_look:
            self._next_look = math.ceil(num_windows * _NEXT_LOOK)
            found = set(self._found(windows(), elapsed_s))
            self._num_running = Counter({reason: self._num_running[reason] + 1 for reason in found})
        if (self._options.to_beat is not None or self._options.may_be_unsure) and not is_stable:
            return None
        return next((reason for reason in _REASONS if self._num_running[reason] >= 2), None)

    def _found(self, windows: Sequence[Window], elapsed_s: float) -> Iterator[Stopped]:
        known, to_beat = self._comparable(windows), self._options.to_beat
        if len(known) >= _ENOUGH_WINDOWS and _half_width(known) <= self._options.precision:
            yield "precise"
        known = known or windows
        if to_beat is not None:
            high = _interval(settled(known))[1]
            taken = sum(window.others_s for window in known) / sum(window.elapsed_s for window in known)
            if high < _SLOWER * to_beat * (1 - taken):
                yield "slower"
        half, is_late = known[: len(known) // 2], elapsed_s >= _SURER_S and self._options.may_be_unsure
        if is_late and len(half) >= FEWEST_WINDOWS and _half_width(known) > _SURER * _half_width(half):
            yield "no_surer"


def calm(windows: Sequence[Window]) -> Sequence[Window]:
    """The windows of which other work took next to nothing; none where these are too few to stand for all."""
    found = [window for window in windows if window.others_s < _CALM * window.elapsed_s]
    least_s = _CALM_PART * sum(window.elapsed_s for window in windows)
    return found if len(found) >= _ENOUGH_WINDOWS and sum(one.elapsed_s for one in found) >= least_s else ()


def settled(windows: Sequence[Window]) -> Sequence[Window]:
    """The windows without those at the beginning that are not like the others yet (caches and allocators fill, clocks
    rise): of the first half, as many are dropped as make the standard error of the rest smallest.

    Source: MSER, White 1997, https://doi.org/10.1177/003754979706900601
    """
    rates = [window.num_samples / window.seconds for window in windows]
    most = min(len(rates) // 2, len(rates) - FEWEST_WINDOWS)
    errors = [statistics.pvariance(rates[start:]) / (len(rates) - start) for start in range(max(most, 0) + 1)]
    return windows[errors.index(min(errors)) :]


def speed_of(windows: Sequence[Window], start_s: float = 0.0) -> Speed:
    """Samples per second over the windows.

    Args:
        windows: at least two.
        start_s: seconds that each sample takes beside them: its part of an epoch's start.
    """
    value = sum(w.num_samples for w in windows) / sum(w.seconds for w in windows)
    low, high = _interval(windows)
    value, low, high = (rate / (1 + rate * start_s) for rate in (value, low, high))
    return Speed(value=value, low=low, high=high)


def _interval(windows: Sequence[Window]) -> tuple[float, float]:
    return confidence_interval([w.num_samples for w in windows], [w.seconds for w in windows])


def _half_width(windows: Sequence[Window]) -> float:
    """Of the interval of settled windows, as a share of the value."""
    found = settled(windows)
    value = sum(w.num_samples for w in found) / sum(w.seconds for w in found)
    low, high = _interval(found)
    return max(high - value, value - low) / value
