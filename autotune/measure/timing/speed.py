"""Speed: times consecutive windows of whole optimizer steps until the throughput's interval is narrow enough."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from ...plan import Speed
from ...ranks import of_first, world_size
from ..feed import Feed
from ..measurement import MeasureOptions
from ..steps import Steps
from .interval import confidence_interval
from .turns import Side

__all__ = ["FEWEST_WINDOWS", "SHORTEST_S", "StoppingRule", "Window", "rate_of", "settled", "speed_of", "time_windows"]

SHORTEST_S = 0.05
FEWEST_WINDOWS = 3
_ENOUGH_WINDOWS = 8
_NEXT_LOOK = 1.25


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


def time_windows(steps: Steps, options: MeasureOptions, at_edge: Callable[[], bool]) -> list[Window]:
    """Run windows until the interval is narrow enough, or the time is over.

    The interval is computed rarely (after 8 windows, then a quarter more each time), since meanwhile loader workers get
    ahead. It must be narrow twice in a row, since one look among many finds it so by chance.

    Args:
        steps: warmed up.
        options: the time share and the precision.
        at_edge: called between windows, outside their time; True ends the run once there are the fewest windows.

    Returns:
        At least :data:`FEWEST_WINDOWS` windows.

    Raises:
        NonFiniteLoss: a loss was NaN or infinite.
    """
    if options.turns is not None:
        return _by_turns(steps, Side(options.turns), at_edge)
    windows: list[Window] = []
    rule = StoppingRule(options)
    while True:
        windows.append(_time_window(steps, _agreed_steps(windows)))
        if of_first(rule.holds(windows, at_edge())):
            return windows


def _by_turns(steps: Steps, side: Side, at_edge: Callable[[], bool]) -> list[Window]:
    windows: list[Window] = []
    goes_on = side.wait()
    while goes_on:
        options = steps.training.loader.options
        turn: list[Window] = []
        for _ in range(1 + options["num_workers"] * (options["prefetch_factor"] or 0)):
            steps.step()
        while sum(window.seconds for window in turn) < side.turn_s:
            turn.append(_time_window(steps, None))
            at_edge()
        windows += turn
        goes_on = side.wait(sum(w.num_samples for w in turn) / sum(w.seconds for w in turn))
    while len(windows) < FEWEST_WINDOWS:
        windows.append(_time_window(steps, None))
    return windows


class StoppingRule:
    """When windows are enough. The interval is looked at rarely, and must be narrow twice running."""

    def __init__(self, options: MeasureOptions) -> None:
        """The time runs from here."""
        self._options = options
        self._next_look, self._num_narrow = _ENOUGH_WINDOWS, 0
        self._began_s = perf_counter()

    def holds(self, windows: Sequence[Window], is_over: bool) -> bool:
        """Asked after each window; ``is_over`` ends it as soon as there are the fewest."""
        is_over = is_over or perf_counter() - self._began_s >= self._options.trial_time_s
        if is_over and len(windows) >= FEWEST_WINDOWS:
            return True
        if len(windows) == self._next_look:
            self._next_look = math.ceil(self._next_look * _NEXT_LOOK)
            is_narrow = _is_narrow(settled(windows), self._options.precision)
            self._num_narrow = self._num_narrow + 1 if is_narrow else 0
        return self._num_narrow == 2


def settled(windows: Sequence[Window]) -> Sequence[Window]:
    """The windows without those at the beginning that are not like the others yet (caches and allocators fill, clocks
    rise): of the first half, as many are dropped as make the standard error of the rest smallest.

    Source: MSER, White 1997, https://doi.org/10.1177/003754979706900601
    """
    rates = [window.num_samples / window.seconds for window in windows]
    most = min(len(rates) // 2, len(rates) - FEWEST_WINDOWS)
    errors = [statistics.pvariance(rates[start:]) / (len(rates) - start) for start in range(max(most, 0) + 1)]
    return windows[errors.index(min(errors)) :]


def speed_of(windows: Sequence[Window], feed: Feed) -> Speed:
    """Samples per second over the windows, each epoch's start spread over the epoch's samples."""
    start_s = feed.epoch_start_s / feed.epoch_samples if feed.epoch_samples else 0.0
    return rate_of(windows, start_s)


def rate_of(windows: Sequence[Window], start_s: float = 0.0) -> Speed:
    """Samples per second over the windows, with ``start_s`` more for each sample."""
    value = sum(w.num_samples for w in windows) / sum(w.seconds for w in windows)
    low, high = _interval(windows)
    value, low, high = (rate / (1 + rate * start_s) for rate in (value, low, high))
    return Speed(value=value, low=low, high=high)


def _agreed_steps(windows: Sequence[Window]) -> int | None:
    """Steps of the next window, in which several ranks have to agree; None where the clock decides."""
    if world_size() == 1:
        return None
    last = windows[-1] if windows else None
    return int(of_first(max(1, math.ceil(last.num_steps * SHORTEST_S / last.seconds)) if last else 1))


def _time_window(steps: Steps, agreed: int | None) -> Window:
    feed = steps.feed
    steps.settle()
    wait_s, aside_s = feed.wait_s, steps.aside_s
    num_samples = num_steps = 0
    began_s, cpu_s = perf_counter(), process_time()
    while num_steps < agreed if agreed else perf_counter() - began_s - (steps.aside_s - aside_s) < SHORTEST_S:
        num_samples += steps.step().num_samples
        num_steps += 1
    steps.settle()
    elapsed_s, cpu_s = perf_counter() - began_s, process_time() - cpu_s
    seconds = elapsed_s - (steps.aside_s - aside_s)
    return Window(seconds, num_samples, num_steps, min(feed.wait_s - wait_s, seconds), elapsed_s, cpu_s)


def _interval(windows: Sequence[Window]) -> tuple[float, float]:
    return confidence_interval([w.num_samples for w in windows], [w.seconds for w in windows])


def _is_narrow(windows: Sequence[Window], precision: float) -> bool:
    value = sum(w.num_samples for w in windows) / sum(w.seconds for w in windows)
    low, high = _interval(windows)
    return max(high - value, value - low) <= precision * value
