"""Speed: the throughput of consecutive windows of whole optimizer steps, and when they are enough of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from ...plan import Speed
from ..measurement import MeasureOptions, Stopped
from .interval import confidence_interval

__all__ = ["FEWEST_WINDOWS", "StoppingRule", "Window", "calm", "settled", "speed_of"]

FEWEST_WINDOWS = 3
_ENOUGH_WINDOWS = 8
_NEXT_LOOK = 1.25
_CALM = 0.05
"""A window of which other work took less than this share is a calm one."""
_CALM_PART = 0.1
"""Least share of the time that calm windows have to hold, to stand for all."""


@dataclass(frozen=True)
class Window:
    """Some whole optimizer steps, with the device synchronized at both ends. Epoch starts and compiling are left
    out."""

    seconds: float
    """Wall time."""
    num_samples: int
    """Samples consumed."""
    num_steps: int
    """Optimizer steps."""
    wait_s: float
    """Seconds of it spent waiting for data."""
    elapsed_s: float
    """Wall time, with epoch starts and compiling."""
    cpu_s: float
    """Processor time of this process meanwhile, all of its threads."""
    others_s: float = 0.0
    """Of the wall time, what other work on the machine took, or a pause of it."""


class StoppingRule:
    """When windows are enough. The interval is looked at rarely (after 8 windows, then a quarter more each time), since
    meanwhile loader workers get ahead. It must be narrow twice running, since one look among many finds it so by
    chance. It is that of the calm windows: where other work comes in bursts, a run lasts until the calm part is
    known."""

    def __init__(self, options: MeasureOptions) -> None:
        """The time runs from here."""
        self._options = options
        self._next_look, self._num_narrow = _ENOUGH_WINDOWS, 0
        self._began_s = perf_counter()

    def reason(self, num_windows: int, calm: Callable[[], Sequence[Window]], is_over: bool) -> Stopped | None:
        """Asked after each window.

        Args:
            num_windows: so far.
            calm: of these, the calm ones; none while there are too few, since there may yet be more.
            is_over: the peak is over the budget: the fewest windows are enough.

        Returns:
            What ends the run here; None where it goes on.
        """
        is_late = perf_counter() - self._began_s >= self._options.trial_time_s
        if (is_over or is_late) and num_windows >= FEWEST_WINDOWS:
            return "over" if is_over else "time"
        if num_windows == self._next_look:
            self._next_look = math.ceil(self._next_look * _NEXT_LOOK)
            is_narrow = bool(found := calm()) and _is_narrow(settled(found), self._options.precision)
            self._num_narrow = self._num_narrow + 1 if is_narrow else 0
        return "precise" if self._num_narrow == 2 else None


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


def _is_narrow(windows: Sequence[Window], precision: float) -> bool:
    value = sum(w.num_samples for w in windows) / sum(w.seconds for w in windows)
    low, high = _interval(windows)
    return max(high - value, value - low) <= precision * value
