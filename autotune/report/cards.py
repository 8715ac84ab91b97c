"""What ``autotune estimate`` says of several cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..estimates import Estimate, untried
from ..estimates.cards import option_name
from ..results import CardsEstimation, OnCard
from ..techniques import Facts
from ..techniques.precision import Precision
from ..units import ceil_mib, format_bytes, size
from .profile import KINDS
from .tables import FittingTable, rows_table

_COLUMNS = ("card", "memory", "batch", "surely", "bound by", "beside fp32")
_FIGURES = (1, 2, 3)
_BY_NEED = (2, 4, 1, 5, 3)


def line(row: OnCard) -> str:
    """One line of progress."""
    return f"{row.card.name}: {_micro(row.estimate)}"


def as_json(found: CardsEstimation) -> dict[str, Any]:
    """Plain data."""
    return {
        "task": found.what.task,
        "fingerprint": found.facts.fingerprint,
        "budget_bytes": found.what.budget_bytes,
        "effective_batch": found.facts.effective_batch,
        "cards": [
            {
                "card": option_name(row.card),
                "memory_bytes": row.card.device.memory_bytes,
                "capability": list(row.card.capability),
                "precisions": list(row.card.precisions),
                "bound_by": _bound(row.estimate, found.facts),
                "estimate": row.estimate.model_dump(mode="json"),
            }
            for row in found.rows
        ],
    }


def explain(found: CardsEstimation) -> RenderableType:
    """The largest micro-batch on each card, what binds it, and in what the card computes."""
    rows = [_cells(row, found.facts) for row in found.rows]
    within = f" within {format_bytes(found.what.budget_bytes)}" if found.what.budget_bytes is not None else ""
    return Group(
        Text(f"{found.what.task}: the largest micro-batch of the job as it stands{within}\n", "bold"),
        FittingTable(_COLUMNS, rows, _FIGURES, _BY_NEED),
        Text(""),
        rows_table([("note", note) for note in _notes(found)]),
    )


def _cells(row: OnCard, facts: Facts) -> tuple[str, ...]:
    estimate, precisions = row.estimate, row.card.precisions
    surely = f"{estimate.surely:,}" if estimate.surely else "none"
    return (
        row.card.name,
        size(row.card.device.memory_bytes),
        _micro(estimate),
        surely if estimate.largest else "",
        _bound(estimate, facts),
        " ".join(kind for kind in precisions if kind != "fp32"),
    )


def _micro(estimate: Estimate) -> str:
    fit = estimate.largest
    if fit is None:
        return "none"
    return f"{fit.micro:,}" if fit.accumulate == 1 else f"{fit.micro:,} × {fit.accumulate}"


def _bound(estimate: Estimate, facts: Facts) -> str:
    """What keeps the micro-batch from being larger."""
    if estimate.largest is None:
        least = estimate.smallest or estimate.reference
        return f"{least.micro} takes {size(ceil_mib(least.process.value))}"
    if facts.dataset_length is not None and estimate.largest.micro >= facts.dataset_length:
        return "the dataset's length"
    held: Counter[str] = Counter()
    for fill in estimate.fills:
        held["workspace of kernels" if fill.kind == "scratch" else KINDS[fill.kind]] += fill.num_bytes
    kind, num_bytes = held.most_common(1)[0]
    return f"{kind} {num_bytes / held.total():.0%}"


def _notes(found: CardsEstimation) -> Iterator[str]:
    """What the figures are, and are not."""
    if unsure := untried(found.facts.torch_version):
        yield unsure
    if stated := found.facts.precision:
        own = Precision(kind=stated)
        without = [row.card.name for row in found.rows if own.lacking(row.card.device) is not None]
        if without:
            yield f"the task states {stated}, which these lack: {', '.join(without)}. State {_instead(stated)} there"
    yield (
        "surely: at the upper end of the interval. No card was asked: kernels are a CPU's, with a GPU's attention, "
        "dropout and optimizer. Memory is what torch can have of a card that nothing else uses"
    )
    if found.facts.conv_dims and (amd := [row.card.name for row in found.rows if row.card.is_amd]):
        yield (
            f"{', '.join(amd)}: what convolutions take there differs from run to run, by public rows of one card: the "
            "interval is wide"
        )
    if found.facts.shapes_vary:
        num_samples = found.facts.lengths.read if found.facts.lengths else 64
        yield f"shapes vary: every batch is one of the largest of {num_samples:,} samples"
    reasons = {row.estimate.reason for row in found.rows if row.estimate.how == "probed"}
    for reason in sorted(filter(None, reasons)):
        yield f"not traced, but measured in real steps at small batches and extended to larger ones: {reason}"
    largest = max(found.rows, key=lambda row: row.card.memory_mib).card
    yield f"what would help on one card, with each technique: --card {option_name(largest)}"


def _instead(stated: str) -> str:
    return "fp32, which takes as much" if stated == "tf32" else "fp16, which takes as much, or fp32"
