"""``autotune show``: a plan in words."""

from __future__ import annotations

import sys
from pathlib import Path

from ..plan import load_plan
from ..report.printing import print_json, print_words
from ..report.show import as_json, explain

__all__ = ["show"]


def show(path: Path, json: bool) -> None:
    """Print a plan in words, or as JSON."""
    plan = load_plan(path)
    if json:
        print_json({"path": str(path), "plan": as_json(plan)})
    else:
        print_words(sys.stdout, explain(plan, path))
