"""Measuring by turns: two processes live at once, and one of them computes at a time.

Each side says over a named pipe that it is ready, and how fast its last turn was; over another it is told to go on, or
to end. Who tells them stops a side's whole process tree meanwhile: :mod:`autotune.workers.turns`.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, PositiveFloat

SAID, GO = "said", "go"
"""The pipes' names in a side's folder."""
_ON, _END = b"+", b"-"
FEWEST_TURNS, _MOST = 4, 10
"""Turns of each side: until they are looked at, and in all."""
_LOOK_AHEAD = 6
"""Pairs from which on it is asked whether all of them could still be enough."""
_NORMAL = 1.96
_TRIMMED = 0.2
"""Share of the turns' ratios that is left out at either end."""


class TurnOptions(BaseModel):
    """How one side takes turns."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    folder: str
    """With the two pipes, on the machine that both sides run on."""
    turn_s: PositiveFloat = 1.0
    """Seconds of timed windows in a turn."""


class Said(NamedTuple):
    """What a side says at the end of a turn, and before its first, the warm-up."""

    pid: int
    """The process whose tree is to be stopped."""
    samples_per_s: float
    """Of the turn; 0 before the warm-up and after it."""
    disturbed: float
    """Share of the turn that other work took."""

    @classmethod
    def read(cls, line: str) -> Said:
        """As :meth:`line` wrote it."""
        pid, samples_per_s, disturbed = line.split()
        return cls(int(pid), float(samples_per_s), float(disturbed))

    def line(self) -> str:
        """``1234 567.8 0.01``, with its end."""
        return f"{self.pid} {self.samples_per_s!r} {self.disturbed!r}\n"


class Side:
    """This process's part in a measurement by turns. It waits with the device idle and nothing of its own running."""

    def __init__(self, options: TurnOptions) -> None:
        self.turn_s = options.turn_s
        self.at_rest_s = 0.0
        """Seconds that it has waited."""
        self._folder, self._is_over = Path(options.folder), False

    def wait(self, samples_per_s: float = 0.0, disturbed: float = 0.0) -> bool:
        """Say how the turn went, and wait for the next.

        Args:
            samples_per_s: of the turn; 0 before the warm-up and after it.
            disturbed: share of it that other work took.

        Returns:
            Whether there is another; False also where nobody is there any more to say so, and once it was told so.
        """
        if self._is_over:
            return False
        said, began_s = Said(os.getpid(), samples_per_s, disturbed).line(), perf_counter()
        (self._folder / SAID).write_text(said)
        with (self._folder / GO).open("rb", buffering=0) as pipe:
            self._is_over = pipe.read(1) != _ON
        self.at_rest_s += perf_counter() - began_s
        return not self._is_over


def answer(pipe: int, goes_on: bool) -> None:
    """Tell a waiting side to take another turn, or to end."""
    os.write(pipe, _ON if goes_on else _END)


def trimmed_mean(values: Sequence[float]) -> tuple[float, float]:
    """The 20 % trimmed mean and its standard error.

    A machine that grows slower between two turns puts one ratio far off, and where it grows faster again, another as
    far to the other side. ``python -m benchmarks.pairs`` compares it with the plain mean.

    Args:
        values: ratios of neighbouring turns; fewer than five are all kept, and one has no error.

    Source: Yuen 1974, Biometrika 61(1).
    """
    number, cut = len(values), int(_TRIMMED * len(values))
    if number < 2:
        return statistics.fmean(values), 0.0
    ordered = sorted(values)
    kept = ordered[cut : number - cut]
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(winsorized) * math.sqrt((number - 1) / (len(kept) * (len(kept) - 1)))
    return statistics.fmean(kept), error


def is_enough(log_ratios: Sequence[float], precision: float) -> bool:
    """Whether another pair of turns would tell nothing: the ratio is known, or it would not be after all of them.

    Args:
        log_ratios: natural logarithms of one side's speed over the other's, of neighbouring turns.
        precision: half of the 95 % interval's width that is wanted, as a share.
    """
    number = len(log_ratios)
    if number < FEWEST_TURNS:
        return False
    half = _NORMAL * trimmed_mean(log_ratios)[1]
    wanted = math.log1p(precision)
    hopeless = number >= _LOOK_AHEAD and half * math.sqrt(number / _MOST) > wanted
    return number >= _MOST or half <= wanted or hopeless
