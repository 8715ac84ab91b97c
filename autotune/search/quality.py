"""Whether the quality of a configuration that changes what the model computes is within the allowed drop."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from scipy.special import stdtrit

from ..measure.measurement import Quality
from .options import Drop

_CONFIDENCE = 0.98
"""One-sided confidence at each look: over three to six pairs with a look after each, at most 5 % of judgements are
wrong."""
_NORMAL = 1.645
"""Standard errors of a one-sided 95 % interval where the error is known."""
_FEWEST = 3
"""Pairs from which on their spread is used."""
_RULED_OUT = 3.0
"""Standard errors of the evaluation beyond the allowed drop from which on one look decides."""
_FAR = 2.0
"""The same, in allowed drops."""
_EARLY = 10.0
"""Allowed drops that a quarter of the recovery may leave."""
UNLIKELY = 2.0
"""Allowed drops that one look may show of what is proven to be within one: with more scatter than that, no six are."""
_TINY = 1e-12
"""Instead of an allowed drop of nothing."""

Judgement = Literal["kept", "dropped", "unknown"]
"""``kept``: the quality is within the drop, at 95 %. ``dropped``: as surely it is not. ``unknown``: more pairs tell."""


def judge_quality(pairs: Sequence[tuple[Quality, Quality]], drop: Drop) -> Judgement:
    """Compare a configuration's quality with the reference's, by Student's interval of their differences.

    Both trained on the same samples after the change, from the same seed, one pair for each seed. The standard error
    that ``evaluate`` returns is added: both are judged by the same few samples.

    Args:
        pairs: (configuration, reference), at least one.
        drop: what is allowed.

    Returns:
        The judgement; ``unknown`` of fewer than three pairs, unless they are far off.
    """
    allowed = drop.of(statistics.fmean(other.value for _, other in pairs))
    differences = [one.value - other.value for one, other in pairs]
    value, told = statistics.fmean(differences), max(one.error for one, _ in pairs)
    if not all(one.is_whole for one, _ in pairs):
        return "dropped"
    if len(pairs) < _FEWEST:
        far = max(_RULED_OUT * told, _FAR * allowed)  # whoever allows so much has an evaluation that is finer than that
        return "dropped" if value < -allowed - far else "unknown"
    student = float(stdtrit(len(differences) - 1, _CONFIDENCE)) * statistics.stdev(differences) / len(pairs) ** 0.5
    half = math.hypot(student, _NORMAL * told)
    if value - half >= -allowed:
        return "kept"
    return "dropped" if value + half < -allowed else "unknown"


def lost_share(one: Quality, reference: Quality, drop: Drop) -> tuple[float, float]:
    """The drop in quality over the allowed one, and its standard error as ``evaluate`` tells it.

    What was given up after a quarter of the training is compared with the reference at that point, and has lost too
    much in any case.
    """
    allowed = max(drop.of(reference.value), _TINY)
    if one.is_whole or reference.early is None:
        return (reference.value - one.value) / allowed, one.error / allowed
    return max((reference.early - one.value) / allowed, 1 + _FAR), one.error / allowed


def reason_of(pairs: Sequence[tuple[Quality, Quality]], drop: Drop) -> str:
    """Both qualities and the allowed drop, in words."""
    value = statistics.fmean(one.value for one, _ in pairs)
    reference = statistics.fmean(other.value for _, other in pairs)
    early = "" if all(one.is_whole for one, _ in pairs) else " after a quarter of the recovery"
    return f"its quality is {value:.4g}{early}, the reference's {reference:.4g}, and {drop} less is allowed"


def least_early(reference: Quality, drop: Drop) -> float | None:
    """The least quality after a quarter of the training that is worth going on with: the reference's at that point,
    less twice what the reference still gains, ten of the allowed drops, and three standard errors of the evaluation.
    What has been pruned gains more than the reference, which has been trained: a CNN with half of its widths was 1 to 6
    points behind after 10 steps of 100, and none in the end."""
    if reference.early is None:
        return None
    gains = max(reference.value - reference.early, 0.0)
    return reference.early - 2 * gains - _EARLY * drop.of(reference.value) - _RULED_OUT * reference.error
