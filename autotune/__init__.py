"""Finds, proves and writes the fastest configuration of a PyTorch training job inside a memory budget."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# ``apply`` lives in apply_plan.py: importing a submodule called ``apply`` would put the module where the function is.
_HOMES = {
    "Plan": "plan",
    "StepResult": "training",
    "Task": "task",
    "Training": "training",
    "apply": "apply_plan",
    "apply_to_loader": "apply_pieces",
    "apply_to_model": "apply_pieces",
    "apply_to_optimizer": "apply_pieces",
    "load_plan": "plan",
    "load_task": "task_file",
    "prepare": "launched",
}
__all__ = [
    "Plan",
    "StepResult",
    "Task",
    "Training",
    "__version__",
    "apply",
    "apply_to_loader",
    "apply_to_model",
    "apply_to_optimizer",
    "load_plan",
    "load_task",
    "prepare",
]

if TYPE_CHECKING:
    from .apply_pieces import apply_to_loader, apply_to_model, apply_to_optimizer
    from .apply_plan import apply
    from .launched import prepare
    from .plan import Plan, load_plan
    from .task import Task
    from .task_file import load_task
    from .training import StepResult, Training


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import autotune`` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
