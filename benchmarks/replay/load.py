"""Other work that begins in mid-search, and what a search makes of the speeds that it leaves."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.measure import Measurement
from autotune.plan import Speed
from autotune.searches.store.pace import Anchor, Correction, Paces, is_due

How = Literal["raw", "divided", "anchors"]
HOW: tuple[How, ...] = ("raw", "divided", "anchors")
_UNLIKE = 0.05
"""Standard deviation of what a load takes from one trial, over what it takes from all."""
_SEEN = 0.8
"""How much of it a trial sees itself, as a logarithm."""


@dataclass(frozen=True)
class Load:
    """Other work."""

    factor: float
    """What speeds are divided by."""
    after: int
    """Trials before it begins; it stays."""
    how: How
    """What is made of speeds: nothing, ``raw``; by what each trial says that other work took, ``divided``; or by the
    reference, measured again between trials, ``anchors``."""


@dataclass
class Loaded:
    """One search under a load."""

    load: Load
    seed: int
    reference: Measurement
    """Without it."""
    num_anchors: int = 0
    _measured: dict[int, Measurement] = field(default_factory=dict)
    _paces: Paces = field(default_factory=Paces)
    _last: Anchor = field(init=False)

    def __post_init__(self) -> None:
        """The reference is measured first of all."""
        self._measured[0] = self.reference
        self._last = Anchor.of(0, self.reference)

    def felt(self, found: Measurement, number: int, run: str = "trial") -> Measurement:
        """A measurement as it would have been after so many trials."""
        if number < self.load.after:
            return found
        chance = random.Random(f"{self.seed}:{run}:{number}")
        taken = math.log(self.load.factor) * chance.gauss(1.0, _UNLIKE)
        told = -math.expm1(-_SEEN * math.log(self.load.factor) * chance.gauss(1.0, _UNLIKE))
        speed = found.samples_per_s
        value, low, high = (one * math.exp(-taken) for one in (speed.value, speed.low, speed.high))
        changed = {"samples_per_s": Speed(value=value, low=low, high=high), "disturbed": min(max(told, 0.0), 1.0)}
        return found.model_copy(update=changed)

    def corrections(self, number: int, found: Measurement | None) -> Mapping[int, Correction]:
        """What is made of all trials once this one has ended, by number from 0 on."""
        if found is not None:
            self._measured[number + 1] = found
            if self.load.how == "anchors" and is_due(number + 1, found.disturbed, self._last):
                again = self.felt(self.reference, number + 1, "anchor")
                self._last = Anchor.of(number + 2, again)
                self._paces.anchors.append(self._last)
                self.num_anchors += 1
        if self.load.how == "raw":
            return {}
        if self.load.how == "divided":
            return {each - 1: Correction(-math.log1p(-one.disturbed)) for each, one in self._measured.items() if each}
        self._paces.update(self._measured)
        return {each - 1: self._paces.of(each) for each in self._measured if each}
