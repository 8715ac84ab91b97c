"""The guard of configurations that change what the model computes: is their quality within the drop that is allowed?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from scipy.special import stdtrit

from ..measure.measurement import Quality
from .options import Drop

__all__ = ["Judgement", "judge_quality", "least_early", "reason_of"]

_CONFIDENCE = 0.98
"""One-sided, at each look: over three to six pairs, one look after each, they are wrong at most 5 times in 100."""
_NORMAL = 1.645
"""The same at 95 % for an error that is known."""
_FEWEST = 3
"""Pairs from which on their spread says something."""
_RULED_OUT = 3.0
"""Standard errors of the evaluation beyond the allowed drop at which one look is enough."""
_FAR = 2.0
"""The same in allowed drops."""

Judgement = Literal["kept", "dropped", "unknown"]
"""``kept``: the quality is within the drop, at 95 %. ``dropped``: as surely it is not. ``unknown``: more pairs tell."""


def judge_quality(pairs: Sequence[tuple[Quality, Quality]], drop: Drop) -> Judgement:
    """Hold a configuration against the reference, by Student's interval of their differences.

    Both had the same training after the change, from the same seed, one pair for each seed. The error that ``evaluate``
    tells is added: it judges both by the same samples, which are a few of all there are.

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


def reason_of(pairs: Sequence[tuple[Quality, Quality]], drop: Drop) -> str:
    """What they came to, in words."""
    value = statistics.fmean(one.value for one, _ in pairs)
    reference = statistics.fmean(other.value for _, other in pairs)
    early = "" if all(one.is_whole for one, _ in pairs) else " after a quarter of the recovery"
    return f"its quality is {value:.4g}{early}, the reference's {reference:.4g}, and {drop} less is allowed"


def least_early(reference: Quality, drop: Drop) -> float | None:
    """The least quality after a quarter of the training that is worth the rest: below the reference's at that point by
    twice what the reference still gains, the allowed drop, and three times the evaluation's own error."""
    if reference.early is None:
        return None
    gains = max(reference.value - reference.early, 0.0)
    return reference.early - 2 * gains - drop.of(reference.value) - _RULED_OUT * reference.error
