"""Parity: compares the losses of the first ten optimizer steps, on a fixed list of batches, with the reference's.

Of a script, whose losses may not be comparable one by one, the course of these steps is compared: learning rates,
samples to a step, and the sum of the losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch
from torch.utils.data import IterableDataset

from ...data.loader import Loader
from ...errors import TaskError
from ...randomness import Randomness
from ...ranks import summed
from ...task import Task
from ...techniques.support.comparable import without_dropout
from ...training.apply_plan import build_loader
from ...training.training import StepResult, Training
from ..errors import NonFiniteLoss
from ..feed import Feed
from ..measurement import NUM_STEPS, Course, MeasureOptions, Parity

_ROUNDINGS = 3.0
"""How many times as far as rounded weights a configuration that rounds may lead: it rounds at every operation."""
_SCALE = 2.0**10
"""The loss scale of an fp16 parity run. Torch's initial 2**16 skips steps until it suits a model, and a skipped step
must not count as a departure from the reference."""
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


def run_parity(
    training: Training, task: Task, options: MeasureOptions, after_step: Callable[[int], None] = lambda step: None
) -> Parity:
    """Train ten optimizer steps with dropout off, and compare their mean losses with the reference's.

    Every configuration sees the same samples in the same order, read in this process. The dataset draws from one stream
    of random numbers. The model draws from another, which is seeded anew at each step. So neither depends on how a step
    is split.

    Args:
        training: as applied; its parameters and optimizer go on from here.
        task: what it was built from.
        options: samples a step, the reference's losses and the limit.
        after_step: called with the number of each optimizer step that ended.

    Raises:
        NonFiniteLoss: a step's mean loss is NaN or infinite.
        TaskError: a loss is a sum over a count that cannot be.
    """
    assert options.parity_batch is not None, "the caller sees to it"
    run = training.with_loader(_fixed_loader(training, task, options.parity_batch))
    run.scaler = torch.amp.GradScaler(training.device.type, init_scale=_SCALE, enabled=training.scaler.is_enabled())
    feed, loading = Feed(run.loader), Randomness(0)
    losses = []
    with without_dropout(training.model):
        for step in range(1, NUM_STEPS + 1):
            losses.append(_mean_loss(run, feed, loading, Randomness(step)))
            if not math.isfinite(losses[-1]):
                raise NonFiniteLoss(step, losses[-1])
            after_step(step)
    return compare(losses, options.reference_losses, options.parity_limit, options.rounded_losses)


def rounded_losses(training: Training, task: Task, options: MeasureOptions) -> tuple[float, ...]:
    """The reference's losses from weights that are rounded to bfloat16 once; none where they are not finite.

    Args:
        training: fresh from :func:`autotune.apply`; it is of no use for anything else afterwards.
        task: what it was built from.
        options: of the reference's parity run.
    """
    with torch.no_grad():
        for parameter in training.model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(parameter.bfloat16())
    try:
        return run_parity(training, task, options).losses
    except NonFiniteLoss:
        return ()


def compare(
    losses: Sequence[float], reference: Sequence[float] | None, limit: float, rounded: Sequence[float] = ()
) -> Parity:
    """How far losses are from the reference's, as a share of the reference's mean magnitude.

    The limit grows with the step: training amplifies rounding. On a ResNet-like model under AdamW, channels_last alone
    (the same sums in another order) is 0.0 % off at step 1, 1.1 % at step 5 and 4.4 % at step 8. What rounds may be off
    by three times of what rounding the weights once comes to, where that is more.

    Args:
        losses: of the configuration.
        reference: of the job as it stands; None for that itself.
        limit: of the first step.
        rounded: of the job as it stands, from rounded weights; none where the configuration does not round.
    """
    if reference is None:
        return Parity(losses=tuple(losses))
    scale = sum(map(abs, reference)) / len(reference) or 1.0
    deviations = [abs(loss - wanted) / scale for loss, wanted in zip(losses, reference, strict=False)]
    rounding = [abs(loss - wanted) / scale for loss, wanted in zip(rounded, reference, strict=False)]

    def most(step: int) -> float:
        return max(limit * step, _ROUNDINGS * max(rounding[:step], default=0.0))

    strayed = next((step for step, deviation in enumerate(deviations, 1) if deviation > most(step)), None)
    return Parity(losses=tuple(losses), deviation=max(deviations), strayed_at=strayed, compared="losses")


def _fixed_loader(training: Training, task: Task, num_samples: int) -> Loader:
    options = {name: value for name, value in training.loader.spec.options.items() if name == "drop_last"}
    spec = dataclasses.replace(training.loader.spec, options=options)
    micro = min(training.batch.micro, num_samples)
    if isinstance(spec.dataset, IterableDataset):  # read in equal micro-batches
        micro = next(size for size in range(micro, 0, -1) if num_samples % size == 0)
    batch = training.batch.model_copy(update={"micro": micro}).with_samples(num_samples)
    return build_loader(task, spec, batch, ranks=training.loader.ranks)


def _check_count(result: StepResult) -> None:
    """A sum over nothing is nothing: a count of 0 beside another sum would leave the sum undivided.

    Raises:
        TaskError: so it is, or the count is no number of anything.
    """
    if 0 < result.weight < math.inf or (result.weight == 0 and not float(result.loss)):
        return
    raise TaskError(
        "compute_loss returned (loss_sum, count) with a loss_sum that is not 0 and a "
        f"count of {result.weight:g}. Wanted: the number of samples or tokens that the sum is over, "
        "or a mean alone."
    )


def _mean_loss(run: Training, feed: Feed, loading: Randomness, computing: Randomness) -> float:
    total = weight = 0.0
    while True:
        with loading:
            batch, position = feed.next()
        with computing:
            result = run.step(batch)
        _check_count(result)
        if result.weight:
            total += float(result.loss) * result.weight
            weight += result.weight
        if position.ends_step:
            break
    if run.loader.ranks.size > 1:
        total, weight = (float(summed(one, run.device)) for one in (total, weight))
    return total / weight if weight else 0.0


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
