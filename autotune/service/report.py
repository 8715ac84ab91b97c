"""A plan in words, as ``autotune show`` prints it."""

from __future__ import annotations

import io
from pathlib import Path

from ..errors import AutotuneError
from ..plan import load_plan
from ..report.printing import print_words
from ..report.show import explain

__all__ = ["report_of"]

_WIDTH = 110


def report_of(path: Path) -> str | None:
    """The words; None where the plan cannot be read."""
    try:
        plan = load_plan(path)
    except AutotuneError:
        return None
    words = io.StringIO()
    print_words(words, explain(plan, Path(path.name)), _WIDTH)
    return words.getvalue()
