"""What ``autotune estimate`` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..estimates import Calibration, Estimate, Fill, Interval, untried
from ..measure.profiling.allocations import OUTSIDE, Phase
from ..plan import Budget
from ..results import Combination, Estimation
from ..techniques import Facts
from ..techniques.checkpointing import Checkpointing
from ..units import format_bytes, size
from ..words import count, facts_words, outcome_words, settings_words
from .profile import KINDS
from .tables import FittingTable, rows_table

WIDTH = 140
"""Columns that the table takes in a pipe."""
_MODULES = 4
"""Groups of modules that are named; the rest are put together."""
_COLUMNS = ("with", "micro-batch", "surely", "tensors", "process", "between", "job's own batch")
"""Of the table; all but the first are figures."""
_BY_NEED, _SHORTEST_NAME = (1, 4, 2, 6, 5, 3), 30


def line(event: Facts | Combination, facts: Facts | None = None) -> str:
    """One line of progress."""
    if isinstance(event, Facts):
        return f"task: {facts_words(event)}"
    found = event.estimate
    if found is None:
        return f"{_name(event, facts)}: {outcome_words(event.outcome, Budget())}"
    said = f"{_name(event, facts)}: {_micro(event)}"
    return said if found.how == "traced" else f"{said}, by real steps: {found.reason}"


def as_json(found: Estimation) -> dict[str, Any]:
    """Plain data."""
    return {
        "task": found.what.task,
        "device": found.what.device,
        "limit_bytes": found.limit_bytes,
        "effective_batch": found.facts.effective_batch,
        "calibration": found.calibration and {"study": found.study, **found.calibration.model_dump(mode="json")},
        "uncalibrated": found.uncalibrated,
        "combinations": [
            {
                "settings": one.settings.model_dump(mode="json", exclude_defaults=True),
                "outcome": one.outcome.kind,
                "failure": None if one.estimate else outcome_words(one.outcome, Budget()),
                "estimate": one.estimate.model_dump(mode="json") if one.estimate else None,
            }
            for one in found.combinations
        ],
        "helps": [
            {"settings": one.settings.model_dump(mode="json", exclude_defaults=True), "micro": one.micro}
            for one in found.helps()
        ],
    }


def explain(found: Estimation) -> RenderableType:
    """The largest micro-batches, what fills the memory, what would help."""
    rows = [_cells(one, found) for one in found.distinct()]
    base = found.base.estimate
    assert base is not None, "the driver sees to it"
    where = f"{found.facts.device.name} ({found.what.device})"
    within = format_bytes(found.limit_bytes) if not found.what.cards else size(found.limit_bytes)
    return Group(
        Text(f"{found.what.task}: the largest micro-batch within {within}, on {where}\n", "bold"),
        FittingTable(_COLUMNS, rows, range(1, len(_COLUMNS)), _BY_NEED, _SHORTEST_NAME),
        Text(f"\n{_peak_words(base)}", style="bold"),
        rows_table(_fills(base)),
        Text("\nWhat alone would help most", style="bold"),
        rows_table(_helps(found)),
        *_lossy(found),
        Text(""),
        rows_table([("note", note) for note in _notes(found)]),
    )


def _cells(one: Combination, found: Estimation) -> tuple[str, ...]:
    name, estimate = _name(one, found.facts), one.estimate
    if estimate is None:
        return (name, "failed", "", "", "", "", "")
    own = size(estimate.reference.process.value)
    if estimate.largest is None:
        return (name, "none", "", "", "", "", own)
    fit, surely = estimate.largest, estimate.surely
    process = fit.process
    return (
        name,
        _micro(one),
        f"{surely:,}" if surely else "none",
        size(fit.tensors.value),
        size(process.value),
        _between(process),
        own,
    )


def _micro(one: Combination) -> str:
    if one.estimate is None or one.estimate.largest is None:
        return "none fits"
    fit = one.estimate.largest
    return f"{fit.micro:,}" if fit.accumulate == 1 else f"{fit.micro:,} × {fit.accumulate}"


def _between(found: Interval) -> str:
    return f"{size(found.low)}–{size(found.high)}"


def _calibrated(by: Calibration, study: str) -> str:
    said = f"process is calibrated by {count(by.num_trials, 'trial')} of study {study}: "
    constant = "−" if by.constant_bytes < 0 else "+"
    said += f"{constant}{size(round(abs(by.constant_bytes)))} and {by.share:+.1%}"
    return said if by.widened == 1 else f"{said}, its interval widened by {by.widened - 1:.0%}"


def _name(one: Combination, facts: Facts | None) -> str:
    return settings_words(one.settings, facts)


def _peak_words(base: Estimate) -> str:
    fit = base.largest or base.smallest or base.reference
    words: dict[str, str] = {Phase.OPTIMIZER: "in the optimizer's step", Phase.BEFORE: "before the step"}
    where = words.get(base.phase)
    if where is None:
        whose = "outside the model's modules" if base.module == OUTSIDE else f"of {base.module or 'the model'}"
        where = f"in the {base.phase} {whose}"
    return (
        f"As it stands, at a micro-batch of {fit.micro:,}, the tensors' peak of {size(fit.tensors.value)} is {where}, "
        f"and {size(base.base_bytes)} are no tensors"
    )


def _fills(base: Estimate) -> Iterator[tuple[str, str]]:
    """Kinds of what fills the peak, the largest first; activations with the modules that made them."""
    kinds = dict.fromkeys(fill.kind for fill in base.fills)
    rows = {kind: [fill for fill in base.fills if fill.kind == kind] for kind in kinds}
    for kind, fills in sorted(rows.items(), key=lambda row: -_total(row[1])):
        named = [f"{_module(fill.module)} {size(fill.num_bytes)}" for fill in fills if kind == "activation"]
        shown = [*named[:_MODULES], f"{len(named) - _MODULES} more"] if len(named) > _MODULES else named
        words = "workspace of a kernel" if kind == "scratch" else KINDS[kind]
        yield words, ": ".join(filter(None, [size(_total(fills)), ", ".join(shown)]))


def _total(fills: list[Fill]) -> int:
    return sum(fill.num_bytes for fill in fills)


def _module(name: str) -> str:
    return name or "the model itself"


def _helps(found: Estimation) -> Iterator[tuple[str, str]]:
    helps = found.helps()
    for one in helps:
        yield _name(one, found.facts), f"{_micro(found.base)} → {_micro(one)}"
    base = found.base.estimate
    blocks = base.blocks if base is not None else None
    if blocks and base is not None:
        chosen = Checkpointing.of(blocks, found.facts.num_blocks).describe(found.facts)
        yield chosen, f"the least for the job's own batch of {base.reference.micro:,}"
    if not helps and not blocks:
        yield "", "nothing: the job as it stands takes as large a micro-batch as any technique alone"


def _lossy(found: Estimation) -> Iterator[RenderableType]:
    """What would be freed by techniques that change what the model computes."""
    base = found.base.estimate
    if base is None or not found.lossy():
        return
    before = base.reference.tensors.value
    rows = []
    for one in found.lossy():
        assert one.estimate is not None, "they are those that were estimated"
        after = one.estimate.reference.tensors.value
        rows.append((_name(one, found.facts), f"{size(before)} → {size(after)} ({after / before - 1:+.0%})"))
    yield Text(
        f"\nLossy, only with --max-quality-drop: tensors at the job's own batch of {base.reference.micro:,}", "bold"
    )
    yield rows_table(rows)


def _notes(found: Estimation) -> Iterator[str]:
    """What the figures are, and are not."""
    if unsure := untried(found.facts.torch_version):
        yield unsure
    for one in found.combinations:
        if one.estimate is None:
            yield f"{_name(one, found.facts)}: {outcome_words(one.outcome, Budget())}"
    left_out = len(found.combinations) - len(found.distinct())
    if left_out:
        yield f"{count(left_out, 'combination')} more, taking just what one above takes"
    if found.what.device == "cuda":
        yield (
            "process is a context and what the allocator would reserve, with what cuBLAS and convolutions work in; no "
            "card was asked: kernels are a CPU's, with a GPU's attention, dropout and optimizer"
        )
    else:
        yield (
            "process is what a budget holds: interpreter, torch and data, tensors, and malloc's slack, which is the "
            "uncertain part; loader workers come on top"
        )
    if found.calibration is not None:
        yield _calibrated(found.calibration, found.study or "")
    if found.uncalibrated is not None:
        yield f"process is not calibrated by trials: {found.uncalibrated}"
    if found.what.limit_bytes is None:
        yield "no --budget was given: this is all of the machine's memory"
    if found.facts.dataset_length is not None and any(
        one.micro >= found.facts.dataset_length for one in found.combinations
    ):
        yield f"no micro-batch is larger than the dataset, which has {found.facts.dataset_length:,} samples"
    if found.facts.shapes_vary:
        num_samples = found.facts.lengths.read if found.facts.lengths else 64
        yield f"shapes vary: every batch is one of the largest of {num_samples:,} samples"
    probed = {one.estimate.reason for one in found.combinations if one.estimate and one.estimate.how == "probed"}
    for reason in sorted(filter(None, probed)):
        yield f"not traced, but measured in real steps at small batches and extended to larger ones: {reason}"
