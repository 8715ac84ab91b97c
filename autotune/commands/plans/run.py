"""``autotune run``: become a job, with its plan applied."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ...errors import UserError
from ...plan import load_plan
from ...report.printing import tell
from ...script.command import own_share, under_launcher
from ...script.distributed_launch import other_than_asked
from ...script.flags import fill, is_split_otherwise
from ...training.launched import ENFORCE_VARIABLE, PLAN_VARIABLE, SPLIT_VARIABLE, STRICT_VARIABLE


def run(path: Path, command: Sequence[str], strict: bool = False, enforce: bool = False) -> NoReturn:
    """Become ``command``, with the plan's environment and ``AUTOTUNE_PLAN`` naming the plan. Python runs a
    script under :mod:`autotune.script`, which applies the rest.

    Raises:
        UserError: the plan cannot be read or needs what is not installed, or there is no such command.
    """
    if not command or not command[0]:
        raise UserError("no command was given. Write it after --: `autotune run plan.yaml -- python train.py`.")
    if command[0].startswith("-"):
        raise UserError(f"{command[0]}: options stand before the plan: `autotune run {command[0]} {path} -- python …`.")
    plan = load_plan(path)
    settings, evaluation = plan.settings, plan.evaluation_batch
    splits = is_split_otherwise(command, own_share(settings))
    command, changed = fill(command, own_share(settings), evaluation)
    if changed is not None:
        tell(f"autotune: {changed}")
    launched = under_launcher(command) if plan.inference is None else None
    if (note := other_than_asked(command)) is not None:
        tell(f"autotune: {note}")
    ours = {PLAN_VARIABLE: str(path.resolve()), SPLIT_VARIABLE: str(int(splits))}
    ours |= {STRICT_VARIABLE: "1"} if strict else {}
    ours |= {ENFORCE_VARIABLE: "1"} if enforce else {}
    environment = {**os.environ, **settings.environment(os.environ), **ours}
    if plan.inference is not None:
        tell(
            f"autotune: {path} is for inference: what is set before a process starts is applied, and the rest is the "
            "job's to apply (autotune.apply(plan, task).infer(batch); AUTOTUNE_PLAN names the plan)."
        )
    elif launched is None:
        tell(
            f"autotune: {command[0]} runs no script by Python: of {path}, what is set before a process starts is "
            "applied, and the rest is the job's to apply (autotune.apply; AUTOTUNE_PLAN names the plan)."
        )
    try:
        started = launched or command
        os.execvpe(started[0], started, environment)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{command[0]}: cannot be started: {reason}. Give a command, such as python train.py."
        ) from None
