"""``autotune share``: one training over unlike devices, from the studies of searches on each."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from .. import __version__
from ..bundle import BUNDLE, Bundle, Member
from ..errors import PlanError, UserError
from ..plan import Environment, Plan, TaskRef
from ..report.printing import listened_to, print_json
from ..search.shares import Timed, quickest, share_out
from ..search.store.stored import Stored, read_study, url_of
from ..techniques import Facts, Settings
from ..techniques.batch import Batch
from ..techniques.parallel import Parallel
from ..units import format_bytes, printable

__all__ = ["WhatToShare", "share", "shared"]


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
    bundle, plans = shared(what)
    try:
        what.output.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise PlanError(f"{what.output}: cannot be made: {reason.strerror}. Choose another folder with -o.") from None
    for member, plan in zip(bundle.plans, plans, strict=True):
        plan.save(what.output / member.plan)
    bundle.save(what.output)
    if json:
        print_json({"exit_code": 0, "path": str(what.output), "bundle": bundle.model_dump(mode="json", by_alias=True)})
        return
    with listened_to(sys.stdout):
        for line in _lines(bundle, plans, what.output):
            print(printable(line))


def shared(what: WhatToShare) -> tuple[Bundle, list[Plan]]:
    """The bundle, and its plans in the same order.

    Raises:
        UserError: the studies are not of one task, or what they measured cannot be shared.
        StudyError: there is no such study.
    """
    pairs = [_named(text) for text in what.studies]
    num_ranks = sum(ranks for _, ranks in pairs)
    studies = [read_study(url_of(name)) for name, _ in pairs]
    held = _one_task(studies)
    effective = what.effective_batch or held
    if not 2 <= num_ranks <= effective:
        raise UserError(
            f"{effective} samples of an optimizer step are to be shared by 2 ranks or more, each with one or more, but "
            f"got {num_ranks}. Name the study of each type of device, STUDY=2 for two ranks of it."
        )
    row = Parallel(kind="ddp", processes=num_ranks, effective=effective)
    types = [_timed(study, row, effective) for study in studies]
    ranks = [number for _, number in pairs]
    try:
        counts = share_out([[*timed] for timed in types], effective, ranks)
    except ValueError as reason:
        raise UserError(f"{reason}. Choose another --effective-batch.") from None
    found = [
        _plan(study, timed, samples, row, what.allow_split)
        for study, timed, samples in zip(studies, types, counts, strict=True)
    ]
    members = [
        Member(
            plan=_file_name(study.record.facts),
            type=(device := study.record.facts.device).type,
            device=device.name,
            memory=device.memory_bytes,
            threads=study.record.facts.num_threads if device.type == "cpu" else None,
            ranks=number,
            samples=samples,
            step_s=step_s,
        )
        for study, number, samples, (_, step_s) in zip(studies, ranks, counts, found, strict=True)
    ]
    try:
        return Bundle(effective=effective, plans=tuple(members)), [plan for plan, _ in found]
    except ValidationError as error:
        raise UserError(f"{error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None


def _file_name(facts: Facts) -> str:
    """``nvidia-h100-80gb-hbm3-79gib.yaml``: of a type of device."""
    parts = [facts.device.name, format_bytes(facts.device.memory_bytes)]
    parts += [f"{facts.num_threads} threads"] if facts.device.type == "cpu" else []
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(parts).lower()).strip("-") + ".yaml"


def _named(text: str) -> tuple[str, int]:
    """``study.db=2``: the storage, and how many ranks."""
    name, sign, number = text.rpartition("=")
    return (name, int(number)) if sign and number.isdecimal() and int(number) > 0 else (text, 1)


def _one_task(studies: Sequence[Stored]) -> int:
    """The batch that all of them held.

    Raises:
        UserError: they are of several tasks, or of one that cannot be shared.
    """
    first = studies[0].record.facts
    for study in studies:
        facts, where = study.record.facts, f"{study.where}: study {study.name}"
        if facts.fingerprint != first.fingerprint or study.record.task != studies[0].record.task:
            raise UserError(f"{where} is of another task than {studies[0].where}. Name studies of one task.")
        if study.record.command is not None:
            raise UserError(f"{where} is of a script, whose gradients are its own to weight. Write a task file for it.")
        if facts.dataset_kind == "iterable":
            raise UserError(f"{where}: an iterable dataset, or a loader of the task's own, cannot be shared out.")
        if facts.effective_batch != first.effective_batch:
            raise UserError(
                f"{where} held a batch of {facts.effective_batch}, and {studies[0].where} one of "
                f"{first.effective_batch}. Search again with one --effective-batch."
            )
    return first.effective_batch


def _timed(study: Stored, row: Parallel, effective: int) -> dict[Timed, Settings]:
    """What was measured and fits: the fastest settings of each micro-batch.

    Raises:
        UserError: nothing.
    """
    found: dict[int, tuple[float, Settings]] = {}
    for tried in study.tried:
        settings, speed = tried.applied, tried.verdict.log_speed
        if not tried.verdict.feasible or tried.number in study.fallen or speed is None or settings.batch is None:
            continue
        micro = min(settings.batch.micro, effective)
        joined = settings.model_copy(update={"parallel": row, "batch": Batch(micro=micro)})
        if settings.parallel.kind != "none" or settings.affect("function") or joined.conflict() is not None:
            continue
        seconds = settings.batch.micro / math.exp(speed)
        if micro not in found or seconds < found[micro][0]:
            found[micro] = seconds, settings
    if not found:
        raise UserError(f"{study.where}: no trial of study {study.name} fits and may be shared. Search further.")
    return {Timed(micro, seconds): settings for micro, (seconds, settings) in found.items()}


def _plan(
    study: Stored, timed: Mapping[Timed, Settings], samples: int, row: Parallel, allow_split: bool
) -> tuple[Plan, float]:
    """A type's plan, and the seconds that its ranks are expected to take.

    Raises:
        UserError: a split batch's gradient is another, and nobody allowed that.
    """
    facts, one = study.record.facts, quickest([*timed], samples)
    batch = Batch.of(samples, one.micro)
    lossy = Batch.of(facts.effective_batch, batch.micro).exactness(facts) == "lossy"
    if lossy and not (allow_split or facts.allow_split):
        raise UserError(
            f"{study.where}: splitting a batch changes this model's gradient (BatchNorm in training, or a loss "
            "averaged over varying counts), so that unequal shares would not train what equal ones do. --allow-split "
            "permits it."
        )
    settings = timed[one].in_force(facts.precision).model_copy(update={"batch": batch, "parallel": row})
    step_s = round(one.seconds_for(samples), 6)
    notes = [
        f"a share of {samples} of {row.effective} samples. Its micro-batch of {one.micro} was measured alone, in study "
        f"{study.name}, at {one.micro / one.seconds:.4g} samples/s: {step_s:.4g} s are expected for the share, without "
        "the exchange of gradients"
    ]
    if lossy:
        notes.append("batch is lossy for this model: it changes the gradient, not only its rounding")
    return Plan(
        task=TaskRef(source=study.record.task, fingerprint=facts.fingerprint, identity=facts.identity),
        budget=study.record.budget,
        settings=settings,
        exactness={each.name: each.exactness(facts) for each in settings.chosen()},
        notes=tuple(notes),
        environment=Environment(
            torch=facts.torch_version,
            device=facts.device.name,
            driver=facts.device.driver,
            autotune=__version__,
            python=platform.python_version(),
            threads=facts.num_threads if facts.device.type == "cpu" else None,
        ),
    ), step_s


def _lines(bundle: Bundle, plans: Sequence[Plan], folder: Path) -> Iterator[str]:
    """For people."""
    last = max(one.step_s for one in bundle.plans)
    yield f"{bundle.effective} samples an optimizer step, expected in {last:.4g} s:"
    for one, plan in zip(bundle.plans, plans, strict=True):
        assert plan.settings.batch is not None, "it states the share"
        times = f"{one.ranks} x " if one.ranks > 1 else ""
        yield (
            f"  {times}{one.describe()}: {one.samples} samples in {one.step_s:.4g} s "
            f"({plan.settings.batch.describe()}): {one.plan}"
        )
    yield f'{folder / BUNDLE}: autotune.load_plan("{folder}") picks the plan for the device that it runs on.'
