"""Warm-up, then windows, of optimizer steps that somebody else makes: a task's own loop, or a script."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

from ...ranks import of_first, world_size
from ..measurement import MeasureOptions, Stopped
from ..memory import LOOKS_S, Charge
from .card import CardWatch
from .disturbance import OtherWork, disturbed_share
from .speed import FEWEST_WINDOWS, StoppingRule, Window, calm, settled, speed_of
from .turns import Side

WARMUP_SHARE = 0.25
"""Longest warm-up, as a share of the trial's time."""
_SHORTEST_S = 0.05
"""Of a window."""
_STABLE = 1.005
"""Factor by which a stable peak may still grow."""
_CALM_STEPS = 2
"""Steps in a row without a skip, and with a stable peak, before timing begins."""

_AHEAD_S, _MOST_AHEAD = 0.5, 4
"""Of windows that a CUDA device has not done yet: the host waits for the first of them where all take longer, or are
more."""
_CALM_WINDOWS = 4
"""Windows in a row with a stable peak, before a race is ended."""


class Reading(NamedTuple):
    """What has run up at a moment; two of them make a window."""

    now_s: float
    """Wall time, from any moment on."""
    cpu_s: float
    """Processor time of this process."""
    between_s: float
    """Of the wall time, what was spent between epochs."""
    compile_s: float
    """Of the wall time, what compiling took."""
    wait_s: float
    """Of the wall time, what was spent waiting for data within epochs."""
    num_samples: int
    """Trained on, by all ranks."""
    num_steps: int
    """Optimizer steps."""
    device_s: float = 0.0
    """Of a mark: as ``now_s``, by the device's clock."""

    @property
    def aside_s(self) -> float:
        """Wall time that belongs to no step."""
        return self.between_s + self.compile_s


class Meter(Protocol):
    """Reads a training while it runs."""

    @property
    def decides_together(self) -> bool:
        """Whether each rank has a meter, so that all do what the first decides."""
        ...

    @property
    def num_ahead(self) -> int:
        """Batches that loader workers may have ready."""
        ...

    def settle(self) -> None:
        """Wait for the device, and check the losses since the last time."""

    def read(self) -> Reading:
        """Now, as the host sees it; a CUDA device may be behind."""
        ...

    def mark(self) -> Callable[[], Reading]:
        """A reading of here, by the device's clock. What is returned waits until the device has come here, and checks
        the losses until here; it is called in the order of marks."""
        ...

    def at_edge(self) -> None:
        """Called after each step of the warm-up and between windows, outside of what is timed."""


class WarmUp:
    """Tells from which step on measuring may begin.

    Every technique has had the steps that it asks for, batches that lay ready are used up, the loss scaler has stopped
    skipping, nothing is compiled, and the peak is stable; or the time for it is over, in which compiling does not
    count. A peak that still grows then is not warned of: it is read after all has run.

    By turns with another process, it is the first turn.
    """

    def __init__(self, meter: Meter, charge: Charge, options: MeasureOptions, fewest_steps: int = 0) -> None:
        """The time runs from here, or once it is this process's turn."""
        self._meter, self._charge = meter, charge
        self.side = Side(options.turns) if options.turns is not None else None
        """What says when it is this process's turn."""
        if self.side is not None:
            self.side.wait()
        self.at_rest_s = self.side.at_rest_s if self.side is not None else 0.0
        """Seconds in which the other process had its turn."""
        self._limit_s = options.trial_time_s * WARMUP_SHARE
        self._num_left, self._num_calm = fewest_steps, 0
        self._peak_bytes, self._began = charge.high_water_bytes(), meter.read()
        self._compiled_s = self._began.compile_s
        self.ran_out = False
        """Whether its time was over before all was settled."""

    @property
    def seconds(self) -> float:
        """What it has taken so far, without compiling."""
        now = self._meter.read()
        return now.now_s - self._began.now_s - (now.compile_s - self._began.compile_s)

    def stepped(self, skipped: bool = False, is_used_up: bool = True) -> bool:
        """A step has ended.

        Args:
            skipped: the loss scaler found infinite gradients in it.
            is_used_up: batches that lay ready when training began are trained on.

        Returns:
            Whether measuring may begin.
        """
        self._meter.settle()
        self._meter.at_edge()
        before, self._peak_bytes = self._peak_bytes, self._charge.high_water_bytes()
        compiled_before_s, self._compiled_s = self._compiled_s, self._meter.read().compile_s
        is_calm = not skipped and self._compiled_s == compiled_before_s and self._peak_bytes <= before * _STABLE
        self._num_calm = self._num_calm + 1 if is_calm else 0
        self._num_left -= 1
        if self._num_left > 0:
            return False
        is_settled, is_late = self._num_calm >= _CALM_STEPS and is_used_up, self.seconds > self._limit_s
        self.ran_out = is_late and not is_settled
        return bool(_agreed(self._meter, is_settled or is_late))


class Timing:
    """Windows of whole optimizer steps, until the speed is known or the time is over; by turns with another process
    where the options say so.

    On a CUDA device, events tell when the device comes to the edges of a window, and the host goes on meanwhile, as in
    the job. If the host waited at each edge, the device would be idle until the next step is ready.
    """

    def __init__(self, meter: Meter, charge: Charge, options: MeasureOptions, side: Side | None = None) -> None:
        """The first window opens here, or once it is this process's turn.

        Args:
            meter: reads the training.
            charge: is asked for the peak, which is held to the options' budget.
            options: how long, and how precisely.
            side: says when it is this process's turn; None where it has the machine to itself.
        """
        self._meter, self._charge = meter, charge
        self._budget = options.budget if options.enforce else None
        charge.sample_descendants()
        self._is_over, self._high_bytes = charge.exceeds(self._budget), charge.high_water_bytes()
        self._windows: list[Window] = []
        self._to_read: deque[tuple[Callable[[], Reading], Callable[[], Reading]]] = deque()
        """Edges of those that the device may not have done yet."""
        # a CUDA device may be ahead of a host that waits: there, all windows can be compared
        self._comparable = calm if not charge.is_cuda else lambda windows: windows
        self._rule, self._grew_at = StoppingRule(options, self._comparable), 0
        self.stopped: Stopped | None = None
        """What ended it; None while it goes on."""
        self._other_work = OtherWork()
        self._card = CardWatch(watches_others=side is None) if charge.is_cuda else None
        self._side, self._rested_s = side, side.at_rest_s if side is not None else 0.0
        self._turn_began_at = self._num_to_skip = 0
        if charge.is_cuda:
            self._num_to_skip = 1  # the host gets ahead of a device that has been waited for
        if self._side is not None:
            self._wait_for_turn(self._side)
        if not self._num_to_skip:
            self._open()

    @property
    def at_rest_s(self) -> float:
        """Seconds since the first window was to open in which the other process had its turn."""
        return self._side.at_rest_s - self._rested_s if self._side is not None else 0.0

    @property
    def windows(self) -> list[Window]:
        """So far, as far as the device has come."""
        taken_s = self._other_work.seconds()[: len(self._windows)]
        shares = self._card.shares() if self._card is not None else [0.0] * len(taken_s)
        found = zip(self._windows, taken_s, shares, strict=False)
        return [dataclasses.replace(one, others_s=taken_s + share * one.elapsed_s) for one, taken_s, share in found]

    def stepped(self) -> bool:
        """A step has ended: close the window, if it is long enough.

        Returns:
            Whether timing is over; with at least :data:`FEWEST_WINDOWS` windows.
        """
        if self._num_to_skip:
            self._num_to_skip -= 1
            if not self._num_to_skip:
                self._open()
            return False
        if not self._is_long_enough():
            return False
        self._to_read.append((self._opened, self._meter.mark()))
        self._other_work.close()
        if self._card is not None:
            self._card.close()
        self._read_all_but(self._num_ahead)
        self._look_at_memory()
        self.stopped = self._reason()
        if self.stopped is not None:
            self.end()
            return True
        self._open()
        return False

    def end(self) -> None:
        """No other step is made."""
        self._read_all_but(0)
        self._charge.sample_descendants()
        self._other_work.end()
        if self._card is not None:
            self._card.end()

    def warnings(self) -> Iterator[str]:
        """What the user should hear of the device."""
        yield from self._card.warnings() if self._card is not None else ()

    def result(self, start_s: float = 0.0) -> dict[str, Any] | None:
        """What a measurement tells of the windows; None where they are too few.

        Args:
            start_s: seconds that each sample takes beside them: its part of an epoch's start.
        """
        if len(self._windows) < FEWEST_WINDOWS:
            return None
        every = self.windows
        kept = self._comparable(every) or every
        windows = settled(kept)
        seconds = sum(window.seconds for window in windows)
        return {
            "samples_per_s": speed_of(windows, start_s),
            "num_steps": sum(window.num_steps for window in windows),
            "num_windows": len(windows),
            "loader_wait": min(1.0, sum(window.wait_s for window in windows) / seconds),
            "disturbed": disturbed_share(windows),
            "calm": min(1.0, sum(w.elapsed_s for w in kept) / sum(w.elapsed_s for w in every)),
            "card": self._card.state() if self._card is not None else None,
            "stopped": self.stopped or "time",
        }

    @property
    def _num_ahead(self) -> int:
        """Windows that the device may have left to do: half a second of them, as the last one says."""
        if not self._charge.is_cuda:
            return 0
        last_s = self._windows[-1].seconds if self._windows else _AHEAD_S
        return max(1, min(_MOST_AHEAD, int(_AHEAD_S / max(last_s, _SHORTEST_S))))

    def _read_all_but(self, num: int) -> None:
        """Wait for the device until it has no more than so many windows left to do."""
        while len(self._to_read) > num:
            opened, closed = self._to_read.popleft()
            self._windows.append(_between(opened(), closed()))

    def _reason(self) -> Stopped | None:
        if self._side is None:
            num_windows = len(self._windows)
            is_stable = num_windows + len(self._to_read) - self._grew_at >= _CALM_WINDOWS
            reason = self._rule.reason(num_windows, lambda: self.windows, self._is_over, is_stable)
            return cast(Stopped | None, _agreed(self._meter, reason))
        turn = self.windows[self._turn_began_at :]
        if sum(window.seconds for window in turn) >= self._side.turn_s and self._goes_on:
            self._wait_for_turn(self._side, turn)
        return None if self._goes_on or len(self._windows) < FEWEST_WINDOWS else "time"

    def _wait_for_turn(self, side: Side, last: Sequence[Window] = ()) -> None:
        """Say how the last turn went. Batches that lay ready when the next begins are trained on, and not timed."""
        rate = sum(window.num_samples for window in last) / sum(window.seconds for window in last) if last else 0.0
        self._read_all_but(0)
        with self._other_work.at_rest():
            self._goes_on = side.wait(rate, disturbed_share(last) if last else 0.0)
        self._turn_began_at, self._num_to_skip = len(self._windows), 1 + self._meter.num_ahead

    def _open(self) -> None:
        self._agreed_steps = self._steps_of_next()
        self._other_work.open()
        if self._card is not None:
            self._card.open()
        self._opened, self._opened_with = self._meter.mark(), self._meter.read()

    def _steps_of_next(self) -> int | None:
        """Steps of the next window, in which several ranks have to agree; None where the clock decides."""
        if not self._meter.decides_together or world_size() == 1:
            return None
        last = self._windows[-1] if self._windows else None
        return int(of_first(max(1, math.ceil(last.num_steps * _SHORTEST_S / last.seconds)) if last else 1))

    def _is_long_enough(self) -> bool:
        now, opened = self._meter.read(), self._opened_with
        if self._agreed_steps is not None:
            return now.num_steps - opened.num_steps >= self._agreed_steps
        return now.now_s - opened.now_s - (now.aside_s - opened.aside_s) >= _SHORTEST_S

    def _look_at_memory(self) -> None:
        self._meter.at_edge()
        self._charge.sample_descendants(LOOKS_S)
        before, self._high_bytes = self._high_bytes, self._charge.high_water_bytes()
        if self._high_bytes > before * _STABLE:
            self._grew_at = len(self._windows) + len(self._to_read)
        self._is_over = self._is_over or (self._high_bytes > before and self._charge.exceeds(self._budget))


def _between(opened: Reading, closed: Reading) -> Window:
    seconds = closed.device_s - opened.device_s - (closed.aside_s - opened.aside_s)
    return Window(
        seconds,
        closed.num_samples - opened.num_samples,
        closed.num_steps - opened.num_steps,
        min(closed.wait_s - opened.wait_s, seconds),
        closed.now_s - opened.now_s,
        closed.cpu_s - opened.cpu_s,
    )


def _agreed(meter: Meter, value: Any) -> Any:
    return of_first(value) if meter.decides_together else value
