"""How long a sample may be that was not read: an extreme-value bound from those that were."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RISK = 0.05
"""The chance that is accepted, that one of the samples that were not read is longer than the bound."""
_FORM = 0.5
"""Of the risk, what the law may take whose form is assumed; the rest is for what it is off."""
_MOST_TIMES = 2.0
"""Longest bound, in times of the longest length read: beyond it the risk is more."""
_SHARE = 0.05
"""Of the lengths read, those that the tail is fitted to."""
_FEWEST, _MOST = 25, 250
_SHAPES = torch.linspace(0.0, 1.0, 41, dtype=torch.float64)[:, None]
_SCALES = torch.logspace(-0.5, 0.5, 61, dtype=torch.float64)[None, :]
"""Times the median excess over its logarithm of two."""
_CAPPED = 10
"""Lengths equal to the longest, and more than all within a tenth below it: samples are cut to that length."""
_STEPS = 60


def bound(lengths: Tensor, num_others: int, risk: float = RISK) -> tuple[float, float]:
    """A length that none of so many others exceeds, but for the risk, if they are of the same law as these; and the
    risk, which is larger than asked for where the bound would be absurd.

    Beyond a high length, the rest follows a generalized Pareto law. Its shape and scale are not known: all that agree
    with the lengths read count by how well they do. Shapes below 0, of laws that end, are left out: they would be
    taken of laws that only thin out faster than exponentially, and end too early. A sample of another kind, of which
    nothing was read, is not foretold: the chance that one such was not read is the share of what was not.

    Args:
        lengths: read, at random.
        num_others: not read.
        risk: asked for, above 0.
    """
    longest = float(lengths.max())
    below = int(((lengths > 0.9 * longest) & (lengths < longest)).sum())
    num_equal = int((lengths == longest).sum())
    if num_others == 0 or longest < 1 or (num_equal >= _CAPPED and num_equal > below):
        return longest, 0.0 if num_others == 0 else risk
    num = min(max(_FEWEST, min(_MOST, round(_SHARE * len(lengths)))), len(lengths) - 1)
    if num < 2:
        return _MOST_TIMES * longest, 1.0
    top = lengths.double().sort(descending=True).values[: num + 1]
    threshold = float(top[-1]) - 0.5  # lengths are whole
    excess = top[:-1] - threshold
    scales = _SCALES * float(excess.median()) / math.log(2)
    weights = _likelihood(excess, scales)
    share = num / len(lengths)

    def missed(value: float) -> float:
        """The chance that one of the others is longer."""
        beyond = share * _survival(value - threshold, scales)
        return float((weights * -torch.expm1(num_others * torch.log1p(-beyond.clamp(max=1 - 1e-12)))).sum())

    low, high = longest, _MOST_TIMES * longest
    if (most := missed(high)) > _FORM * risk:
        return high, max(risk, min(1.0, most / _FORM))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if missed(middle) > _FORM * risk else (low, middle)
    return high, risk


def _likelihood(excess: Tensor, scales: Tensor) -> Tensor:
    """(shapes, scales): of each pair, as a share of all; flat in shape and in the logarithm of scale before."""
    scaled = excess / scales[..., None]
    flat = _SHAPES == 0
    shapes = torch.where(flat, 1.0, _SHAPES)
    curved = (1 + 1 / shapes) * torch.log1p(shapes[..., None] * scaled).sum(-1)
    total = -torch.where(flat, scaled.sum(-1), curved) - len(excess) * scales.log()
    return torch.softmax(total.flatten(), 0).view(total.shape)


def _survival(excess: float, scales: Tensor) -> Tensor:
    """(shapes, scales): the chance of an excess above this."""
    flat = _SHAPES == 0
    shapes = torch.where(flat, 1.0, _SHAPES)
    return torch.where(flat, torch.exp(-excess / scales), (1 + shapes * excess / scales) ** (-1 / shapes))
