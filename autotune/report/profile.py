"""What ``autotune profile`` says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..measure.profiling.allocations import OUTSIDE, Kind, Phase
from ..measure.profiling.types import PeakMoment, Profile
from ..plan import Budget
from ..results import Change, Profiling
from ..techniques import Facts, Settings, Technique
from ..units import printable, size
from ..words import facts_words, outcome_words, settings_words
from .folding import Line, lines
from .tables import FittingTable, rows_table

WIDTH = 140
"""Columns that the table takes in a pipe."""

_COLUMNS = ("module", "type", "parameters", "kept", "at the peak", "forward", "backward", "what would free most of it")
"""Of the table."""
_FIGURES = range(2, 7)
_BY_NEED = (4, 3, 6, 5, 7, 2, 1)
"""The columns that a narrow terminal has, the last first to go."""
KINDS: dict[Kind, str] = {
    "parameter": "parameters and buffers",
    "optimizer_state": "optimizer state",
    "gradient": "gradients",
    "activation": "kept activations",
    "temporary": "temporaries",
    "batch": "batch",
    "other": "what was there before",
}
"""What a storage serves, in words."""
_HEAVY_HOOKS = 1.1
"""Steps that the hooks make so many times longer are worth a word."""


def line(event: Facts | Settings | Change, facts: Facts | None = None) -> str:
    """One line of progress."""
    match event:
        case Facts():
            return f"task: {facts_words(event)}"
        case Settings():
            return f"profiles: {settings_words(event, facts)}"
        case Change(technique=technique):
            return f"with {technique.describe(facts)}: {_outcome(event)}"


def as_json(found: Profiling) -> dict[str, Any]:
    """Plain data; the chart's points are left to the page."""
    document = found.base.model_dump(mode="json", exclude={"timeline"})
    rows = _best_of_rows(found)
    for row, best in zip(document["modules"], rows, strict=True):
        row["would_free_most"] = best
    return {
        "task": found.task,
        "settings": found.settings.model_dump(mode="json", exclude_defaults=True),
        **document,
        "changes": [
            {
                **_setting(change.technique),
                "outcome": change.outcome.kind,
                "failure": None if change.profile else outcome_words(change.outcome, Budget()),
                "peak": change.profile.peak.model_dump(mode="json") if change.profile else None,
                "kept_bytes": _kept_bytes(change.profile) if change.profile else None,
            }
            for change in found.changes
        ],
        "not_measured": [_setting(technique) for technique in found.not_measured],
    }


def _best_of_rows(found: Profiling) -> Iterator[dict[str, Any] | None]:
    """For each row of the profile, the change that frees most of what it keeps, as plain data."""
    for row in found.base.modules:
        best = _best_change(found, Line("", 0, (row,)))
        yield best and {**_setting(best[0].technique), "freed_bytes": best[1]}


def _setting(technique: Technique) -> dict[str, Any]:
    return {"technique": technique.name, "setting": technique.model_dump(mode="json", exclude_defaults=True)}


def explain(found: Profiling, depth: int | None = None) -> RenderableType:
    """The table, the peak, and what each technique would make of it."""
    headings = columns(found)
    rows = [cells(row, found) for row in lines(found.base.modules, depth)]
    by_need = [number for number in _BY_NEED if number < len(headings)]
    return Group(
        Text(f"{title(found)}\n", style="bold"),
        FittingTable(headings, rows, _FIGURES, by_need),
        Text(f"\n{peak_words(found.base.peak, found.base)}", style="bold"),
        rows_table([(KINDS[kind], size(num_bytes)) for kind, num_bytes in found.base.peak.by_kind.items()]),
        *_changed(found),
        Text(""),
        rows_table([("note", note) for note in notes(found.base)]),
    )


def columns(found: Profiling) -> tuple[str, ...]:
    """The table's headings; without the last where no technique was tried."""
    return _COLUMNS if found.changes else _COLUMNS[:-1]


def cells(row: Line, found: Profiling) -> tuple[str, ...]:
    """One line of the table, in the order of :func:`columns`."""
    best = _best_change(found, row)
    freed = f"{size(best[1])} by {best[0].technique.describe(found.facts)}" if best else ""
    parameters, kept, at_peak = (row.sum(name) for name in ("num_parameters", "kept_bytes", "peak_bytes"))
    found_cells = (
        "  " * row.depth + printable(row.label),
        printable(row.type),
        f"{parameters:,}" if parameters else "",
        size(kept) if kept else "",
        size(at_peak) if at_peak else "",
        _milliseconds(row.sum("forward_s")),
        _milliseconds(row.sum("backward_s")),
        freed,
    )
    return found_cells[: len(columns(found))]


def _best_change(found: Profiling, row: Line) -> tuple[Change, int] | None:
    """The change that frees most of what a line's modules keep, with the bytes; None where none does."""
    best = None
    for change in found.changes:
        if change.profile is None:
            continue
        kept = {other.name: other.kept_bytes for other in change.profile.modules}
        freed = row.sum("kept_bytes") - sum(kept.get(name, 0) for name in row.names)
        if freed > (best[1] if best else 0):
            best = change, freed
    return best


def title(found: Profiling) -> str:
    """The task, and what is applied."""
    return f"{found.task}: one optimizer step, {settings_words(found.settings, found.facts)}"


def changes(found: Profiling) -> Iterator[tuple[str, str]]:
    """Each technique with what became of the peak, the lowest first: ``195 MiB → 104 MiB (-47%), in the …``."""
    without = [one for one in found.changes if _changes_nothing(one, found.base)]
    order = sorted(found.changes, key=lambda one: one.profile.peak.num_bytes if one.profile else math.inf)
    for one in order:
        if one not in without:
            yield one.technique.describe(found.facts), _outcome(one, found.base)
    if without:
        yield "no change by", ", ".join(one.technique.describe(found.facts) for one in without)
    if found.not_measured:
        left_out = ", ".join(one.describe(found.facts) for one in found.not_measured)
        yield "not measured", f"{left_out}: interrupted"


def _changes_nothing(change: Change, base: Profile) -> bool:
    after = change.profile
    return after is not None and (after.peak.num_bytes, _kept_bytes(after)) == (base.peak.num_bytes, _kept_bytes(base))


def peak_words(peak: PeakMoment, base: Profile) -> str:
    """``The peak of the tensors, 512 MiB, is in the backward of head, 3% through that pass.``"""
    moment = moment_words(peak, base)
    return f"The peak of the tensors, {size(peak.num_bytes)}, is {moment}, {peak.position:.0%} through that pass."


def notes(base: Profile) -> Iterator[str]:
    """What the figures are, and are not."""
    yield (
        f"the process was charged {size(base.process.process)} at its peak, which is what a budget holds: these "
        "tensors, and torch itself, the allocator's slack, kernels' workspace and the loader"
    )
    if base.first_step_peak_bytes > base.peak.num_bytes:
        yield f"the first step's peak is higher: {size(base.first_step_peak_bytes)}"
    if not base.sees_saves:
        yield "torch.func's gradients do not let what is saved be watched: kept is all that a forward leaves behind"
    if base.process.largest_of is not None:
        yield f"batch shapes vary: this is the largest of {base.process.largest_of} batches, again and again"
    if base.process.longest is not None:
        yield f"batch shapes vary: this is {base.process.longest.words()}, again and again"
    if base.step_s and base.timed_step_s and base.timed_step_s > base.step_s * _HEAVY_HOOKS:
        yield (
            f"a step takes {_milliseconds(base.step_s)}, and {_milliseconds(base.timed_step_s)} with the hooks that "
            "time its modules: small ones look slower than they are"
        )


def _changed(found: Profiling) -> Iterator[RenderableType]:
    if found.changes or found.not_measured:
        yield Text("\nWith one technique changed, the peak of the tensors", style="bold")
        yield rows_table(changes(found))


def _outcome(change: Change, base: Profile | None = None) -> str:
    after = change.profile
    if after is None:
        return outcome_words(change.outcome, Budget())
    if base is None:
        return f"peak {size(after.peak.num_bytes)}"
    before, now = (size(one.peak.num_bytes) for one in (base, after))
    ratio = after.peak.num_bytes / base.peak.num_bytes - 1
    kept = f"kept {size(_kept_bytes(base))} → {size(_kept_bytes(after))}"
    return f"{before} → {now} ({ratio:+.0%}), {moment_words(after.peak, after)}; {kept}{_lossy(change, base, after)}"


def _lossy(change: Change, base: Profile, after: Profile) -> str:
    """Of what changes the function: what becomes of the parameters, and what allows it."""
    if "function" not in change.technique.affects:
        return ""
    before, now = (one.modules[0].num_parameters for one in (base, after))
    return f"; {before:,} → {now:,} parameters; lossy, only with --max-quality-drop"


def moment_words(peak: PeakMoment, base: Profile) -> str:
    """``in the backward of head``."""
    whose = peak.module or base.modules[0].type
    match peak.phase:
        case Phase.OPTIMIZER:
            return "in the optimizer's step"
        case Phase.BEFORE:
            return "before the step"
    if peak.module == OUTSIDE:
        return f"in {peak.phase}, outside the model's modules"
    return f"in the {peak.phase} of {printable(whose)}"


def _kept_bytes(base: Profile) -> int:
    return sum(row.kept_bytes for row in base.modules if row.name in ("", OUTSIDE))


def _milliseconds(seconds: float | None) -> str:
    """``12.3 ms``; nothing for what takes less than a hook does."""
    if seconds is None or seconds < 5e-6:
        return ""
    value = seconds * 1000
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
