"""Is what a configuration loses in quality within the allowed drop? A function of pairs alone: each is the
configuration's quality and the reference's, trained from one seed and judged by the same examples.

Proven is what is so by the first three pairs, or by six: to look more often is to err more often. The level is that of
both looks together: where the true drop is the allowed one, at most 5 % are kept in the simulation of ``python -m
benchmarks.guard --part level`` (5.3 % in one of 30 rows, of 3,000 draws each), whether seeds scatter there as they do,
up to eight times as much, or not at all.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from ...measure.checks.scores import unpack
from ...measure.measurement import Quality
from ..options import Drop
from ..time_budget import MOST_ROUNDS, NUM_REPEATS

Judgement = Literal["kept", "dropped", "futile", "unknown"]
"""``kept``: the quality is within the drop, at 95 %. ``dropped``: as surely it is not. ``futile``: it is unlikely that
it will be proven. ``unknown``: more pairs tell."""
Pairs = Sequence[tuple[Quality, Quality]]
"""(configuration, reference), one of each seed."""

_CONFIDENCE = 0.975
"""One-sided confidence over seeds at each look: of both together, at most 5 % are wrong."""
_CONFIDENCE_LEFT = 0.985
"""The same where a part of that variance was found by examples, and taken away: what is left is less sure."""
_LOOKS = (NUM_REPEATS, MOST_ROUNDS)
"""Numbers of pairs by which a configuration may be proven."""
_NORMAL = 1.645
"""Standard errors of a one-sided 95 % interval over examples, which are the same at each look."""
_FEWEST = 3
"""Pairs from which on their spread is used."""
_RULED_OUT = 3.0
"""Standard errors of the evaluation beyond the allowed drop from which on one look decides."""
FAR = 2.0
"""The same, in allowed drops."""
_USUAL, _FREEDOM = 1 / 3, 2
"""Standard deviation from seed to seed, in allowed drops, that is expected of what is not known, and how many pairs
that weighs as much as."""
_LASTING = 0.5
"""Of one pair's variance over examples, the share that more seeds do not average out: where that is not known."""
_FUTILE = 0.05
"""Chance of being proven by the last pair below which no more are made."""
_PAIRED = 0.6
"""Standard error of a difference on the same examples, over that of one evaluation: 0.52 of a VGG, 0.75 of an MLP, half
of which was pruned."""


@dataclass(frozen=True)
class Difference:
    """A configuration's quality less the reference's."""

    value: float
    num_pairs: int
    seeds: float = 0.0
    """Variance from pair to pair, examples aside."""
    examples: float = 0.0
    """Variance of ``value`` over examples; 0 where nothing is known of it."""
    passing: float = 0.0
    """The part of ``examples`` that more pairs average out, times their number."""
    least: float = 0.0
    """What ``examples`` is at least."""

    def half(self, num_pairs: int | None = None) -> float:
        """Half the width of its interval, of so many pairs.

        Source: the sum of both parts, each by its own quantile: Banerjee 1960, Sankhya 22, 319, whose level holds
        whatever the two variances are.
        """
        number = num_pairs or self.num_pairs
        confidence = _CONFIDENCE_LEFT if self.passing else _CONFIDENCE
        student = float(stdtrit(number - 1, confidence)) * math.sqrt(self.seeds / number)
        return math.hypot(student, _NORMAL * math.sqrt(self._examples_at(number)))

    def _examples_at(self, number: int) -> float:
        return max(self.least, self.examples - self.passing / self.num_pairs + self.passing / number)


def difference_of(pairs: Pairs, allowed: float) -> Difference:
    """The mean of the pairs' differences, with its variance over seeds and over examples.

    Args:
        pairs: at least one.
        allowed: the drop. Where it is true, examples differ by so much on average that their variance is not below it
            times the largest difference: few examples of which none differs do not prove that none would.
    """
    differences = [one.value - other.value for one, other in pairs]
    value, number = statistics.fmean(differences), len(pairs)
    seeds = statistics.variance(differences) if number > 1 else 0.0
    found = _by_example(pairs)
    if found is None:
        told = statistics.fmean(one.error**2 + other.error**2 for one, other in pairs)
        return Difference(value, number, seeds, examples=told)
    count = found.shape[1]
    means = found.mean(axis=0)
    least = allowed * _largest(found + np.array(differences)[:, None], pairs) / count
    examples = max(float(means.var(ddof=1)) / count, least)
    if number == 1:
        return Difference(value, number, seeds, examples, (1 - _LASTING) * examples, least)
    passing = float(((found - means) ** 2).sum()) / ((number - 1) * (count - 1) * count)
    return Difference(value, number, max(0.0, seeds - passing), examples, min(passing, number * examples), least)


def _by_example(pairs: Pairs) -> NDArray[np.float64] | None:
    """Of each pair (in rows), the differences of examples less their mean; None where they have no scores of the same
    examples."""
    packed = [score for pair in pairs for one in pair if (score := one.scores) is not None]
    scores = [np.array(unpack(one), dtype=float) for one in packed]
    if len(scores) < 2 * len(pairs) or len({len(one) for one in scores}) > 1:
        return None
    found: NDArray[np.float64] = np.stack(scores[::2]) - np.stack(scores[1::2])
    return found


def _largest(found: NDArray[np.float64], pairs: Pairs) -> float:
    """The largest difference of an example; where none differs, the smallest that two scores have."""
    if (largest := float(np.abs(found).max())) > 0:
        return largest
    one = pairs[0][1]
    steps = np.diff(np.unique(np.array(unpack(one.scores or ""), dtype=float)))
    return float(steps.min()) if len(steps) else abs(one.value)


def judge_quality(pairs: Pairs, drop: Drop) -> Judgement:
    """Compare a configuration's quality with the reference's, by an interval of their difference over seeds and
    examples.

    Both trained on the same samples after the change. Scores of examples are compared example by example; standard
    errors that ``evaluate`` returns are added as if each had its own examples, since more is not known of them. A
    number alone tells nothing of examples: the judgement is of these.

    Args:
        pairs: at least one.
        drop: what is allowed.

    Returns:
        The judgement; ``unknown`` of fewer than three pairs, unless they are far off.
    """
    if not all(one.is_whole for one, _ in pairs):
        return "dropped"
    allowed = allowed_by(pairs, drop)
    found = difference_of(pairs, allowed)
    if len(pairs) < _FEWEST:
        far = max(_RULED_OUT * math.sqrt(found.examples), FAR * allowed)
        return "dropped" if found.value < -allowed - far else "unknown"
    half = found.half()
    if found.value - half >= -allowed:
        return "kept"
    return "dropped" if found.value + half < -allowed else "unknown"


def allowed_by(pairs: Pairs, drop: Drop) -> float:
    """The allowed drop, in units of the quality."""
    return drop.of(statistics.fmean(other.value for _, other in pairs))


def chance(pairs: Pairs, drop: Drop, are_counted: bool = True) -> float:
    """Of being proven by :data:`MOST_ROUNDS` pairs, by those that there are.

    Args:
        pairs: at least one.
        drop: what is allowed.
        are_counted: whether these are the first of them; else all of those are made anew.
    """
    allowed = allowed_by(pairs, drop)
    found, number = difference_of(pairs, allowed), len(pairs)
    freedom = _FREEDOM + number - 1
    each = found.seeds + found.passing
    each = (_FREEDOM * (_USUAL * allowed) ** 2 + (number - 1) * each) / freedom
    expected = dataclasses.replace(found, seeds=max(each - found.passing, 0.0))
    ahead = each * (1 / number - 1 / MOST_ROUNDS if are_counted else 1 / number + 1 / MOST_ROUNDS)
    room = found.value + allowed - expected.half(MOST_ROUNDS)
    return float(stdtr(freedom, room / math.sqrt(ahead))) if ahead > 0 else float(room >= 0)


def look(pairs: Pairs, drop: Drop) -> Judgement:
    """The judgement of the first pairs, of :data:`.time_budget.MOST_ROUNDS` at most: kept by as many as
    :data:`_LOOKS` has, and otherwise unknown as yet."""
    if any(judge_quality(pairs[:number], drop) == "kept" for number in _LOOKS if number <= len(pairs)):
        return "kept"
    judgement = judge_quality(pairs, drop)
    if judgement == "dropped":
        return judgement
    return "futile" if chance(pairs, drop) < _FUTILE else "unknown"


def least_provable(reference: Quality) -> float | None:
    """The smallest allowed drop within which :data:`.time_budget.MOST_ROUNDS` pairs would prove what loses nothing in
    half of all cases, by the examples of the reference's own evaluation; seeds add to it. None where they have no known
    error.

    Of scores it is an estimate: models that differ little are right about the same examples.
    """
    if reference.scores is None:
        return _NORMAL * math.sqrt(2) * reference.error or None
    few = _NORMAL**2 * _largest(np.zeros((1, 1)), [(reference, reference)]) / len(unpack(reference.scores))
    return max(_NORMAL * _PAIRED * reference.error, few)
