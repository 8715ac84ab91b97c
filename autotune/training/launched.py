"""How a script's launcher and functions like ``autotune.apply`` in the same process find each other."""

from __future__ import annotations

from typing import Any, Protocol

PLAN_VARIABLE = "AUTOTUNE_PLAN"
"""Environment variable: path of the plan that a job runs with."""
STRICT_VARIABLE = "AUTOTUNE_STRICT"
"""Environment variable: 1 refuses a plan on another machine than it was measured on."""
ENFORCE_VARIABLE = "AUTOTUNE_ENFORCE"
"""Environment variable: 1 keeps a job on CUDA within its plan's budget also where that ends it."""
SPLIT_VARIABLE = "AUTOTUNE_SPLIT"
"""Environment variable: 1 where the plan's batch, in a command's flags, is split otherwise than the command's own."""
TRIAL_VARIABLE = "AUTOTUNE_TRIAL"
"""Environment variable: folder of the trial that a script runs for."""


class Launcher(Protocol):
    """Applies a plan to the script that it runs."""

    def prepare(self, model: Any, optimizer: Any, loader: Any) -> None:
        """Take the model, optimizer and loader that the plan is for."""

    def stand_aside(self) -> None:
        """Do nothing more: the script applies its plan itself."""


_launcher: Launcher | None = None


def launcher() -> Launcher | None:
    """The launcher of this process; None if there is none, or if it has no plan to apply."""
    return _launcher


def set_launcher(one: Launcher | None) -> None:
    """Set the launcher of this process."""
    global _launcher
    _launcher = one


def stand_aside() -> None:
    """Called wherever a script's own code applies a plan, so that none is applied twice."""
    if _launcher is not None:
        _launcher.stand_aside()


def prepare(model: Any, optimizer: Any = None, loader: Any = None) -> tuple[Any, Any, Any]:
    """Tell ``autotune run`` what a plan is for, where a script has several models, optimizers or training loaders.

    Without a plan applied it does nothing. With one, that is applied to these three: to the loader as it is iterated,
    to model and optimizer as the model is first trained. Call it before either.

    Args:
        model: the module that the training loop calls.
        optimizer: of its parameters.
        loader: the ``DataLoader`` that feeds it; None where there is none.

    Returns:
        The three as they were given.
    """
    if _launcher is not None:
        _launcher.prepare(model, optimizer, loader)
    return model, optimizer, loader
