"""Arithmetic of choices: by which ratios groups are cut, and which candidates go on with their recovery."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch

from ..checks.scores import unpack
from ..measurement import Quality

GRID = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.825, 0.9)
"""Ratios by which a group may be cut."""
_FAR = (math.inf, 16.0, 4.0)
"""Allowed drops that a candidate may have lost after an eighth, a quarter and a half of the recovery: after an eighth,
which may be a handful of steps, a CNN with half of its widths was 54 points behind, and none in the end."""
_AS_FAST = 1.02
"""Step times, or peaks, up to this ratio are one."""
_PARTS = 16
"""Of a width, in which ratios are told apart in the end."""
_NORMAL, _LEAST_ROOM = 1.645, 0.3
"""Standard errors over examples that a proof leaves between what was lost and what is allowed, and the least share of
that for what seeds make of it."""


@dataclass(frozen=True)
class Standing:
    """A candidate after a part of the recovery."""

    number: int
    step: float
    """Time of a step over the reference's, or its peak where that is what has to become smaller."""
    lost: float
    """Drop in quality over the allowed one."""

    @property
    def worth(self) -> float:
        """Logarithm of the speed, divided by what was lost where that is more than allowed."""
        return -math.log(self.step) / max(self.lost, 1.0)


def going_on(standings: Sequence[Standing], rung: int, most: int) -> list[int]:
    """Numbers of those that go on: the better half, but no fewer than ``most``, and the safest of all is among them.

    What has lost too much to be kept ends, and what another beats.

    Args:
        standings: of all that came so far.
        rung: from 0.
        most: how many may come to the end.
    """
    able = [one for one in standings if one.lost <= _FAR[rung] and not any(_beats(other, one) for other in standings)]
    if not able:
        return []
    ranked = sorted(able, key=lambda one: -one.worth)
    kept = ranked[: max(most, -(-len(standings) // 2))]
    safest = min(able, key=lambda one: one.lost)
    if safest not in kept:
        kept[-1] = safest
    return sorted(one.number for one in kept)


def _beats(one: Standing, other: Standing) -> bool:
    """Whether one is as fast, and loses less by as much as is allowed: what is less hangs on chance."""
    return one.step <= other.step * _AS_FAST and one.lost + 1.0 <= other.lost


def between(kept: Sequence[Standing], failed: Sequence[Standing], left: Sequence[Standing]) -> int | None:
    """Which of those that were left out is worth a trial after all: it may be kept, and is faster than all that are.

    Args:
        kept: came to the end, and lost no more than is allowed.
        failed: came to the end, and lost more.
        left: ended before; ``lost`` is of where they ended.

    Returns:
        The number of the one that is worth most; None where none lies between.
    """
    fastest = min((one.step for one in kept), default=1.0)
    slowest = max((one.step for one in failed if one.step < fastest), default=0.0)
    found = [one for one in left if slowest * _AS_FAST < one.step and one.step * _AS_FAST < fastest]
    return max(found, key=lambda one: one.worth).number if found else None


def halfway(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float] | None:
    """Ratios between those of two cuts, of the groups that both name; None where none lie between."""
    both = [name for name in one if name in other]
    found = {name: round(_PARTS * (one[name] + other[name]) / 2) / _PARTS for name in both}
    return None if any(found == {name: each[name] for name in both} for each in (one, other)) else found


def provable(pairs: Sequence[tuple[Quality, Quality]], allowed: float) -> float:
    """The share of the allowed drop that may be lost in the end by what can still be proven to be within it.

    Args:
        pairs: qualities of a cut and of the job as it stands, seed by seed.
        allowed: the drop, in units of the quality.
    """
    return max(0.0, 1 - max(_LEAST_ROOM, _NORMAL * _error(pairs, allowed) / allowed))


def _error(pairs: Sequence[tuple[Quality, Quality]], allowed: float) -> float:
    """Standard error over examples of the mean difference, at least that of few examples which would differ by the
    allowed drop; of numbers with errors, as if each had its own examples."""
    packed = [(one.scores, other.scores) for one, other in pairs if one.scores and other.scores]
    if len(packed) < len(pairs):
        return fmean(math.hypot(one.error, other.error) for one, other in pairs)
    scores = torch.tensor([[[*unpack(one)] for one in pair] for pair in packed])
    scores += torch.tensor([[one.value, other.value] for one, other in pairs])[..., None]
    differences = scores[:, 0] - scores[:, 1]
    largest = float(differences.abs().max()) or abs(pairs[0][1].value)
    return math.sqrt(max(float(differences.mean(0).var()), allowed * largest) / scores.shape[-1])


@dataclass(frozen=True)
class Layer:
    """A part of a step whose time, or memory, goes by the widths of some groups."""

    cost: float
    """Seconds, or bytes."""
    groups: tuple[str, ...] = ()
    """It takes the share that is left of each, multiplied."""


def cost_of(layers: Sequence[Layer], ratios: Mapping[str, float]) -> float:
    """Of a step in which this share of each group's channels is cut."""
    return sum(one.cost * math.prod(1 - ratios[name] for name in one.groups) for one in layers)


def rise_at(ratio: float, rises: Sequence[tuple[float, float]]) -> float:
    """What the loss rises by, between measured ratios on a straight line; beyond the last one twice as steeply."""
    known = [(0.0, 0.0), *rises]
    for (below, least), (above, most) in pairwise(known):
        if ratio <= above or (above, most) == known[-1]:
            slope = (most - least) / (above - below)
            return least + slope * (min(ratio, above) - below) + 2 * slope * max(ratio - above, 0.0)
    return 0.0


def ratios_for(
    targets: Sequence[float], layers: Sequence[Layer], rises: Mapping[str, Sequence[tuple[float, float]]]
) -> list[dict[str, float]]:
    """Ratios for each group, such that a step takes these shares of its time, or memory, and the loss rises least.

    It is bought step by step where a second, or a byte, costs the least rise.

    Args:
        targets: shares of it, descending.
        layers: of a step, as measured.
        rises: of each group, measured ratios with what the loss rises by, ascending in both.

    Returns:
        In the order of ``targets``, as far as they can be had.
    """
    place = dict.fromkeys(rises, 0)
    found: list[dict[str, float]] = []
    whole = cost_of(layers, dict.fromkeys(rises, 0.0))
    for target in targets:
        while (now := cost_of(layers, _ratios(place))) > target * whole:
            options = []
            for name in [name for name, at in place.items() if at + 1 < len(GRID)]:
                saved = now - cost_of(layers, _ratios({**place, name: place[name] + 1}))
                before, after = (rise_at(GRID[place[name] + more], rises[name]) for more in (0, 1))
                if saved > 0:
                    options.append(((after - before) / saved, -saved, name))
            if not options:
                return found
            place[min(options)[2]] += 1
        found.append(_ratios(place))
    return found


def _ratios(place: Mapping[str, int]) -> dict[str, float]:
    return {name: GRID[at] for name, at in place.items()}
