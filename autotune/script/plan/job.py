"""A job with a plan: the script that runs in this process, before torch is there and after."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...plan import load_plan
from ...ranks import this_rank
from ...training.launched import SPLIT_VARIABLE
from ..refusal import is_success, say
from .applied import InScript

if TYPE_CHECKING:
    from .hooks import ScriptHooks


class ScriptJob:
    """A plan for the script that runs in this process."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the plan.

        Raises:
            PlanError: it cannot be read.
        """
        self._plan, self._process = InScript(load_plan(path), path), os.getpid()
        self._hooks: ScriptHooks | None = None
        self._plan.check_ranks()
        self._plan.is_split_unseen = self._plan.plan.checked is None and os.environ.get(SPLIT_VARIABLE) == "1"

    def arrive(self) -> None:
        """Torch is there: apply the plan."""
        from .hooks import ScriptHooks

        self._hooks = ScriptHooks(self._plan)
        self._hooks.install()

    def ended(self, error: BaseException | None) -> None:
        """The script came to its end: say so if it made no optimizer step that the plan could be seen in, or ran out of
        memory within its budget."""
        if error is not None and self._hooks is not None:
            self._tell_out_of_memory(error)
        if os.getpid() != self._process or this_rank().rank or not is_success(error):
            return
        if self._hooks is None or not (self._hooks.has_stepped or self._hooks.stands_aside):
            say(
                "the script ended without an optimizer step in this process, where no more of "
                f"{os.path.relpath(self._plan.path)} was applied than what is set before a process starts. A plan "
                "does not reach processes that a script starts itself (multiprocessing): have torchrun start them."
            )

    def _tell_out_of_memory(self, error: BaseException) -> None:
        from ...device_memory import cap
        from ...training.out_of_memory import ran_out

        if cap.may_stand_aside() and ran_out(error) == "device":
            print(
                "autotune: memory ran out where the job was held to its plan's budget. Without limit below budget in "
                f"{os.path.relpath(self._plan.path)} it may take all of the device's.",
                file=sys.stderr,
                flush=True,
            )
