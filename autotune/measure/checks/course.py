"""The course of a script's first optimizer steps, held against the reference's where each loss cannot be: learning
rates, samples to a step, and the sum of the losses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from ..measurement import Course

_RATE = 0.01
"""Largest relative difference of a learning rate: one that follows the losses moves with their rounding."""
_SUM = 1.5
"""How many times the reference's a sum of losses may be: what is left undivided is at least twice it, and noise
(dropout, augmentation) is less over some steps."""
_DIVIDE = "Divide each loss by the backward passes to a step before it is passed back: `(loss / accumulate).backward()`"
_PER_STEP = (
    "Make it of the samples of an optimizer step (micro-batch × accumulation), and step the schedule with the "
    "optimizer, not with each micro-batch"
)


def course_of(rates: Sequence[Sequence[float]], num_samples: Sequence[int]) -> Course:
    """A record of the first steps.

    Args:
        rates: at each step, the learning rate of each parameter group.
        num_samples: trained on by the end of each step.
    """
    each = [after - before for before, after in pairwise(num_samples)]
    return Course(rates=tuple(map(tuple, rates)), step_samples=median(each) if each else None)


def why_unlike(
    mine: Course, reference: Course, losses: Sequence[float] = (), reference_losses: Sequence[float] = ()
) -> str | None:
    """In what a configuration trains otherwise than the reference, with what to change; None where in nothing.

    Args:
        mine: of the configuration.
        reference: of the job as it stands.
        losses: of the configuration's steps.
        reference_losses: of the job's.
    """
    for step, (rates, theirs) in enumerate(zip(mine.rates, reference.rates, strict=False), 1):
        if len(rates) != len(theirs):
            return f"at step {step} its optimizer has {len(rates)} parameter groups, and the job's {len(theirs)}"
        for rate, wanted in zip(rates, theirs, strict=True):
            if abs(rate - wanted) > _RATE * max(abs(rate), abs(wanted)):
                return f"at step {step} its learning rate is {rate:.4g}, and the job's is {wanted:.4g}. {_PER_STEP}"
    if None not in (mine.step_samples, reference.step_samples) and mine.step_samples != reference.step_samples:
        return f"an optimizer step is of {mine.step_samples:g} samples, and the job's of {reference.step_samples:g}"
    both = list(zip(losses, reference_losses, strict=False))
    total, wanted = (sum(abs(pair[one]) for pair in both) for one in (0, 1))
    if both and wanted and not 1 / _SUM < total / wanted < _SUM:
        return f"the losses of {len(both)} steps add up to {total / wanted:.2g} times the job's. {_DIVIDE}"
    return None
