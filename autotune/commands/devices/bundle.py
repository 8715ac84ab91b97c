"""Writes the plans of one training over unlike devices, and says what each of them does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...bundle import BUNDLE, Bundle
from ...errors import PlanError
from ...searches.winner.unlike import Share, SharedTraining
from ...words import count


def save(training: SharedTraining, shares: Sequence[Share], folder: Path) -> Bundle:
    """Write the bundle of a training and its plans.

    Raises:
        UserError: two types of device cannot be told apart.
        PlanError: they cannot be written.
    """
    bundle = training.bundle(shares)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise PlanError(f"{folder}: cannot be made: {reason.strerror}. Choose another folder with -o.") from None
    for member, each in zip(bundle.plans, shares, strict=True):
        each.plan.save(folder / member.plan)
    bundle.save(folder)
    return bundle


def bundle_lines(bundle: Bundle, shares: Sequence[Share], folder: Path) -> Iterator[str]:
    """For people."""
    plans = [each.plan for each in shares]
    last = max(one.step_s for one in bundle.plans)
    yield f"{bundle.effective} samples an optimizer step, expected in {last:.4g} s:"
    for one, plan in zip(bundle.plans, plans, strict=True):
        assert plan.settings.batch is not None, "it states the share"
        times = f"{one.ranks} x " if one.ranks > 1 else ""
        yield (
            f"  {times}{one.describe()}: {count(one.samples, 'sample')} in {one.step_s:.4g} s "
            f"({plan.settings.batch.describe()}): {one.plan}"
        )
    yield from dict.fromkeys(note for plan in plans for note in plan.notes[1:])
    yield f'{folder / BUNDLE}: autotune.load_plan("{folder}") picks the plan for the device that it runs on.'
