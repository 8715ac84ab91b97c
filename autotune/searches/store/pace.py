"""What a trial would have shown when the reference was measured: its speed, less what other work took meanwhile.

The reference is measured again every few trials, as an anchor; where it could not be measured, the first trial that
could takes its place. A trial is compared with the anchors around it in time:
where these show another speed than the reference had at first, by more than their errors, the trial's is corrected by
as much. These speeds rank trials alone: a plan states what was measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...measure import Measurement
from ...plan import Speed

_DISTURBED = 0.05
"""Share of a run's time that other work took from which on it counts as disturbed."""
_TRIALS_APART = 5
"""Trials between two anchors on a quiet machine."""
_DISTURBED_APART = 2
"""The same while trials are disturbed."""
_FROM_RUN_TO_RUN = 0.03
"""Relative standard deviation between two processes of one configuration, beside what each states."""
_SURELY = 2.0
"""Standard errors that a change of pace has to exceed."""
_UNLIKE, _ALIKE = 0.5, 0.1
"""Standard error of a trial, over what other work took from it (as a logarithm): of the part that its anchors did not
meet, and of all of it, since other work does not take the same from every configuration."""
_UNSURE = 0.1
"""Standard error from which on a speed by itself decides nothing."""
_MOST = 0.95
"""Share of the time above which what other work took is not told apart."""
_Z = 1.96


@dataclass(frozen=True)
class Anchor:
    """A measurement of the same configuration at some moment of the search: of the reference, where that runs."""

    position: int
    """Trials that had been begun before it: for the first, the trial's own number."""
    log_speed: float
    """Natural logarithm of samples per second."""
    error: float
    """Standard error of that."""
    disturbed: float
    """Share of its time that other work took."""

    @classmethod
    def of(cls, position: int, found: Measurement) -> Anchor:
        """Of a measurement."""
        return cls(position, math.log(found.samples_per_s.value), error_of(found.samples_per_s), found.disturbed)


@dataclass(frozen=True)
class Correction:
    """What is added to the logarithm of a trial's speed."""

    shift: float = 0.0
    error: float = 0.0
    """Standard error that other work adds to it."""

    @property
    def is_sure(self) -> bool:
        """Whether the trial's speed may decide by itself."""
        return self.error <= _UNSURE


UNCORRECTED = Correction()


def correction(number: int, disturbed: float, anchors: Sequence[Anchor]) -> Correction:
    """How a trial's speed compares with others'.

    Of the anchors before and after it, the one counts that was disturbed if the trial was, and not if not. Where that
    tells nothing, the pace may have changed at any moment between them: it is taken in proportion.

    Args:
        number: the trial's.
        disturbed: share of its time that other work took.
        anchors: in order, that configuration's own trial first; empty corrects nothing.
    """
    if not anchors or number == anchors[0].position:
        return UNCORRECTED
    first, shares = anchors[0], _around(number, disturbed, anchors)
    level = sum(share * one.log_speed for one, share in shares.items())
    met = sum(share * _taken(one.disturbed) for one, share in shares.items())
    error = math.sqrt(sum(share * one.error**2 for one, share in shares.items()))
    spread = math.sqrt(sum(share * (one.log_speed - level) ** 2 for one, share in shares.items()))
    change = level - first.log_speed
    unsure = math.hypot(_UNLIKE * (_taken(disturbed) - met), _ALIKE * _taken(disturbed))
    if abs(change) <= _SURELY * math.hypot(error, first.error):
        return Correction(0.0, unsure)
    return Correction(-change, math.hypot(error, first.error, spread, unsure))


def error_of(speed: Speed) -> float:
    """Standard error of a run's speed, as a logarithm: of its interval, and from one process to the next."""
    return math.hypot((speed.high - speed.low) / (2 * _Z * speed.value), _FROM_RUN_TO_RUN)


class Paces:
    """The anchors of a search, and the corrections that follow from them."""

    def __init__(self) -> None:
        self.anchors: list[Anchor] = []
        """Later measurements of the configuration, in order."""
        self._first: list[Anchor] = []
        self._corrections: dict[int, Correction] = {}

    def of(self, number: int) -> Correction:
        """A trial's correction; none where it is not known."""
        return self._corrections.get(number, UNCORRECTED)

    def now(self, disturbed: float) -> Correction:
        """That of what is measured after all anchors."""
        return correction(sys.maxsize, disturbed, [*self._first, *self.anchors])

    @property
    def shift(self) -> float:
        """What is added to the logarithm of a speed that is measured now, as the newest anchor has it."""
        return self.now(self.anchors[-1].disturbed).shift if self.anchors else 0.0

    def update(self, measured: Mapping[int, Measurement]) -> bool:
        """Correct trials, by number, from the first that was measured on; returns whether anything is corrected
        otherwise."""
        self._first = [Anchor.of(number, measured[number]) for number in sorted(measured)[:1]]
        every, before = [*self._first, *self.anchors], self._corrections
        self._corrections = {number: correction(number, one.disturbed, every) for number, one in measured.items()}
        return any(before.get(number, UNCORRECTED) != now for number, now in self._corrections.items())


def weighed(speeds: Sequence[tuple[float, float]]) -> float:
    """The mean of a configuration's speeds, each a logarithm with the standard error that other work adds to it."""
    weights = [1 / (_FROM_RUN_TO_RUN**2 + error**2) for _, error in speeds]
    return sum(weight * value for weight, (value, _) in zip(weights, speeds, strict=True)) / sum(weights)


def is_other(disturbed: float, last: Anchor) -> bool:
    """Whether other work has begun, ended or changed since an anchor."""
    return abs(disturbed - last.disturbed) > _DISTURBED


def is_due(number: int, disturbed: float, last: Anchor) -> bool:
    """Whether the last anchor was measured too many trials ago, or :func:`is_other`."""
    apart = _DISTURBED_APART if disturbed > _DISTURBED else _TRIALS_APART
    return is_other(disturbed, last) or number + 1 - max(last.position, 1) >= apart


def _around(number: int, disturbed: float, anchors: Sequence[Anchor]) -> Mapping[Anchor, float]:
    """The anchors that a trial is compared with, and the share of each."""
    before = [one for one in anchors if one.position <= number][-1]
    after = next((one for one in anchors if one.position > number), None)
    if after is None:
        return {before: 1.0}
    alike = [one for one in (before, after) if (one.disturbed > _DISTURBED) == (disturbed > _DISTURBED)]
    if len(alike) == 1:
        return {alike[0]: 1.0}
    part = (number + 0.5 - before.position) / (after.position - before.position)
    return {before: 1 - part, after: part}


def _taken(disturbed: float) -> float:
    """What other work takes of a speed, as a logarithm, at least."""
    return -math.log1p(-min(disturbed, _MOST))
