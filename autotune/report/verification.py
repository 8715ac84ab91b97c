"""What ``autotune verify`` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..plan import Plan
from ..results import Verification
from ..units import size
from .show import evaluation_words, inferred_quality_words, latency_row, life_row, peak_words, speed_words
from .tables import rows_table

_MOST_RANKS = 4
"""Processes whose peaks are told one by one."""


def as_json(found: Verification, plan: Plan) -> dict[str, Any]:
    """Plain data."""
    return {
        "holds": found.holds,
        "over_budget": found.over_budget,
        "slower": found.slower,
        "warnings": list(found.warnings),
        "measured": found.measured.model_dump(mode="json", exclude_none=True) if found.measured else None,
        "evaluation": found.evaluation.model_dump(mode="json", exclude_none=True) if found.evaluation else None,
        "bytes_by_rank": list(found.bytes_by_rank),
        "deviation": found.deviation,
        "inference": found.inferred.model_dump(mode="json", exclude_none=True) if found.inferred else None,
        "stated": plan.measured.model_dump(mode="json", exclude_none=True) if plan.measured else None,
    }


def explain(found: Verification, plan: Plan) -> RenderableType:
    """The verdict and what it rests on."""
    verdict = "The plan is within its budget." if found.holds else f"The plan does not hold: {found.over_budget}."
    if found.slower:
        verdict += f" It is slower than it says: {found.slower}."
    elif found.holds:
        verdict = "The plan holds."
    rows: list[tuple[str, RenderableType]] = []
    if found.measured is not None:
        rows += [
            ("speed", speed_words(found.measured.samples_per_s)),
            ("peak", peak_words(found.measured, plan.budget)),
        ]
        rows += latency_row(found.measured, plan.budget)
        rows += life_row(found.measured.peak)
    if found.deviation is not None and plan.inference is not None:
        tolerance = plan.inference.tolerance
        allowed = "" if tolerance is None else f"; {tolerance:.2%} is allowed"
        rows.append(("outputs", f"{found.deviation:.2%} from those of the job as it stands at most{allowed}"))
    if found.inferred is not None and found.inferred.quality is not None:
        rows.append(("quality", inferred_quality_words(found.inferred)))
    if found.bytes_by_rank:
        rows.append(("largest process", _largest_words(found.bytes_by_rank)))
    if found.measured is not None and found.evaluation is not None:
        rows.append(("evaluation", evaluation_words(found.evaluation, found.measured.peak)))
    if plan.measured is not None:
        stated = f"{speed_words(plan.measured.samples_per_s)}; {peak_words(plan.measured, plan.budget)}"
        rows.append(("the plan said", stated))
    return Group(Text(verdict, style="bold"), rows_table(rows))


def _largest_words(bytes_by_rank: Sequence[int]) -> str:
    """``process 1: 0.31 GiB; process 0: 0.30 GiB``, the largest first."""
    ranks = sorted(range(len(bytes_by_rank)), key=lambda rank: -bytes_by_rank[rank])
    told = "; ".join(f"process {rank}: {size(bytes_by_rank[rank])}" for rank in ranks[:_MOST_RANKS])
    return told + (f"; and {len(ranks) - _MOST_RANKS} smaller" if len(ranks) > _MOST_RANKS else "")
