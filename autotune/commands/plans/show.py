"""``autotune show``: a plan in words."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from ...errors import PlanError
from ...plan import load_plan
from ...report.printing import print_json, print_words
from ...report.show import as_json, explain


def show(path: Path, json: bool, framework: str | None = None) -> None:
    """Print a plan in words, or as JSON, or what to write in a job of a framework.

    Raises:
        PlanError: the plan cannot be read, or the framework cannot say it.
    """
    plan = load_plan(path)
    if framework is not None and plan.inference is not None:
        raise PlanError(f"{path}: the plan is for inference, and {framework} trains. Leave out --for.")
    if framework is not None:
        written: str = importlib.import_module(f"autotune.integrations.{framework}").written(plan)
        if json:
            print_json({"path": str(path), "for": framework, "written": written})
        else:
            print(written, end="")
    elif json:
        print_json({"path": str(path), "plan": as_json(plan)})
    else:
        print_words(sys.stdout, explain(plan, path))
