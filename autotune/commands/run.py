"""``autotune run``: become a job, with the environment that its plan needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import UserError
from ..plan import load_plan

__all__ = ["run"]


def run(path: Path, command: Sequence[str]) -> NoReturn:
    """Become ``command``, with the plan's environment in force and ``AUTOTUNE_PLAN`` naming the plan.

    Raises:
        UserError: the plan cannot be read or needs what is not installed, or there is no such command.
    """
    if not command or not command[0]:
        raise UserError("no command was given. Write it after --: `autotune run plan.yaml -- python train.py`.")
    settings = load_plan(path).settings
    environment = {**os.environ, **settings.environment(os.environ), "AUTOTUNE_PLAN": str(path.resolve())}
    try:
        os.execvpe(command[0], list(command), environment)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{command[0]}: cannot be started: {reason}. Give a command, such as python train.py."
        ) from None
