"""A table of where a search's seconds went."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from ..searches.seconds import BESIDE, Spent, total_s
from ..units import format_duration
from .tables import rows_table


def spent_table(spent: Spent) -> RenderableType:
    """A row for each thing that was done."""
    heading = Text(f"Where {format_duration(total_s(spent))} went", style="bold")
    return Group(heading, rows_table((done, _row(phases)) for done, phases in spent.items()))


def _row(phases: Mapping[str, float]) -> str:
    words = format_duration(sum(phases.values()))
    told = [f"{phase} {value:.1f} s" for phase, value in phases.items() if value >= 0.05]
    return f"{words}: {', '.join(told)}" if set(phases) - {BESIDE} else words
