"""Finds, proves and writes the fastest configuration of a PyTorch training job inside a memory budget."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from .distribution import VERSION, conflict

__version__ = VERSION

_HOMES = {
    "Fitted": "fitting.fitted",
    "Plan": "plan",
    "StepResult": "training.training",
    "Task": "task",
    "Training": "training.training",
    "apply": "training.apply_plan",
    "apply_to_loader": "training.apply_pieces",
    "apply_to_model": "training.apply_pieces",
    "apply_to_optimizer": "training.apply_pieces",
    "estimate": "api",
    "fit": "fitting.fit",
    "from_lightning": "integrations.lightning.task",
    "from_trainer": "integrations.trainer_task",
    "load_plan": "plan",
    "load_task": "task_file",
    "prepare": "training.launched",
    "search": "api",
    "verify": "api",
}
__all__ = [
    "Fitted",
    "Plan",
    "StepResult",
    "Task",
    "Training",
    "__version__",
    "apply",
    "apply_to_loader",
    "apply_to_model",
    "apply_to_optimizer",
    "estimate",
    "fit",
    "from_lightning",
    "from_trainer",
    "load_plan",
    "load_task",
    "prepare",
    "search",
    "verify",
]

if sys.platform == "win32":
    raise ImportError(
        "autotune runs on Linux, and on macOS, but not on Windows itself: it measures in processes that it forks, ends "
        "and reads the memory of, which Windows has no calls for. Use it in WSL 2, which has the GPU, too: "
        "https://learn.microsoft.com/windows/wsl/install. To train there by a plan that was found elsewhere, state its "
        "settings in the training's own code: plan.yaml is text."
    )
if _found := conflict():
    warnings.warn(_found, stacklevel=2)

if TYPE_CHECKING:
    from .api import estimate, search, verify
    from .fitting.fit import fit
    from .fitting.fitted import Fitted
    from .integrations.lightning.task import from_lightning
    from .integrations.trainer_task import from_trainer
    from .plan import Plan, load_plan
    from .task import Task
    from .task_file import load_task
    from .training.apply_pieces import apply_to_loader, apply_to_model, apply_to_optimizer
    from .training.apply_plan import apply
    from .training.launched import prepare
    from .training.training import StepResult, Training


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import autotune`` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
