"""``autotune share``: one training over unlike devices, from the studies of searches on each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...bundle import BUNDLE, Bundle
from ...errors import PlanError
from ...report.printing import listened_to, print_json
from ...report.words import count
from ...searches.winner.unlike import Share, SharedTraining
from ...units import printable


@dataclass(frozen=True)
class WhatToShare:
    """What the user asked for. Every field is an argument or option of ``autotune share``."""

    studies: Sequence[str]
    """Path or URL of the study of a search on each type of device, ``=2`` behind it for two ranks on such."""
    output: Path
    """``--output``: the bundle's folder."""
    effective_batch: int | None = None
    """``--effective-batch``: samples in an optimizer step, of all ranks; None is what the studies held."""
    allow_split: bool = False
    """``--allow-split``: although a split batch's gradient is another."""


def share(what: WhatToShare, json: bool) -> None:
    """Write a bundle, and print what it comes to, or one JSON document.

    Raises:
        UserError: the studies are not of one task, or what they measured cannot be shared.
        StudyError: there is no such study.
        PlanError: the bundle cannot be written.
    """
    pairs = [_named(text) for text in what.studies]
    training = SharedTraining.read(pairs, what.effective_batch, what.allow_split)
    shares = training.expected()
    bundle = save(training, shares, what.output)
    if json:
        print_json({"exit_code": 0, "path": str(what.output), "bundle": bundle.model_dump(mode="json", by_alias=True)})
        return
    with listened_to(sys.stdout):
        for line in bundle_lines(bundle, shares, what.output):
            print(printable(line))


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


def _named(text: str) -> tuple[str, int]:
    """``study.db=2``: the storage, and how many ranks."""
    name, sign, number = text.rpartition("=")
    return (name, int(number)) if sign and number.isdecimal() and int(number) > 0 else (text, 1)
