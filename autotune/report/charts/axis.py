"""Axes of charts: where values lie, and the round ones that are written beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

_AROUND = 0.1
"""Share of an axis that is left free at either end."""
_NUM = 5
"""Steps between ticks, about."""


@dataclass(frozen=True)
class Axis:
    """From values to places along an axis."""

    low: float
    high: float
    ticks: tuple[float, ...]
    """Round values between the two."""

    @classmethod
    def of(cls, values: Iterable[float], *, from_zero: bool = False, is_bytes: bool = False) -> Self:
        """An axis that holds all of the values, with room about them.

        Args:
            values: at least one.
            from_zero: begin at 0.
            is_bytes: ticks are round in KiB, MiB or GiB.
        """
        known = list(values)
        least, most = min(known), max(known)
        around = _AROUND * ((most - least) or abs(most) or 1.0)
        low, high = 0.0 if from_zero else least - around, most + around
        return cls(low, high, tuple(byte_ticks(low, high) if is_bytes else ticks(low, high)))

    def place(self, value: float, length: float) -> float:
        """Distance from the low end of an axis of this length."""
        return length * (value - self.low) / (self.high - self.low)


def ticks(low: float, high: float, unit: float = 1.0) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten of ``unit``, from ``low`` to ``high``."""
    rough = (high - low) / unit / _NUM
    digit = 10 ** math.floor(math.log10(rough))
    step = next(digit * n for n in (1, 2, 5, 10) if digit * n >= rough) * unit
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def byte_ticks(low: float, high: float) -> list[int]:
    """The same in KiB, MiB or GiB, as ``high`` is."""
    unit = 1024 ** max(0, math.floor(math.log(high, 1024)))
    return [round(value) for value in ticks(low, high, unit)]
