"""Where a command's trials run, and whether they are heard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import UserError
from ..ranks import world_size
from ..report.printing import tell
from ..script.distributed_launch import num_processes
from ..task_file import refuse_script, split_source
from ..units import printable
from .interrupts import ignore_interrupts

if TYPE_CHECKING:
    from ..plan import Plan
    from ..searches.options import SearchOptions
    from ..workers import Executor


@dataclass(frozen=True)
class Where:
    """Where trials run, and whether they are heard."""

    executor: Literal["local", "ray"]
    address: str | None = None
    """A Ray cluster's; None is this machine."""
    is_script: bool = False
    """The job is a script, and not a task file."""
    verbose: bool = False
    """Show on stderr what the task prints."""
    device_name: str | None = None
    """Part of a device's name and memory, where there are unlike ones."""
    gpus_per_trial: int | None = 1
    """One for each process of the job; None is all that there are."""
    in_turns: bool = False
    """Other searches share a cluster's devices by trial, as those of a service do."""
    is_command: bool = True
    """This process is a command, and ends with it; else it is a user's own, whose signals and children stay its own."""

    def open(self, task: str, device: Literal["cpu", "cuda"]) -> Executor:
        """An executor; the caller closes it.

        Raises:
            UserError: no such task file, or nothing of a task in it; Ray is asked for and is not installed, or
                ``address`` is given without it; this machine's GPU cannot be measured on.
        """
        path = Path(task).parent if self.is_script else split_source(task)[0].parent
        if not self.is_script:
            refuse_script(task)  # first, since an executor takes seconds to start
        if self.executor == "local":
            if self.address is not None:
                raise UserError("--address names a Ray cluster, but --executor is local. Leave one of them out.")
            from ..workers.local import LocalExecutor

            return LocalExecutor(device, self.device_name, self.gpus_per_trial)
        from ..workers.cluster import RayExecutor

        return RayExecutor(device, self.device_name, self.address, path, tell, self.gpus_per_trial, self.in_turns)

    def for_search(self, options: SearchOptions) -> Where:
        """The same, with as many GPUs in each trial as the job, or a choice of the space, has processes.

        Raises:
            UserError: the space, or what the command's launcher reads, is none.
        """
        if options.device == "cpu":
            return self
        if options.command is not None:
            return replace(self, gpus_per_trial=num_processes(options.command))
        from ..search_spaces import load_space

        return replace(self, gpus_per_trial=load_space(options.space).most_processes)

    def for_plan(self, plan: Plan, command: Sequence[str] | None) -> Where:
        """The same, with as many GPUs as the plan, or the script's command, has processes."""
        number = num_processes(command) if command else plan.settings.parallel.processes
        return self if plan.budget.device == "cpu" else replace(self, gpus_per_trial=number)


def default_device(address: str | None = None) -> Literal["cpu", "cuda"]:
    """``cuda`` where this machine has a GPU that can be measured on, found without importing torch. Where it has one
    that cannot be, that is told, once.

    Args:
        address: of a Ray cluster, whose nodes count in place of this machine.

    Raises:
        TrialsLost: the cluster does not answer.
    """
    if address is not None:
        from ..workers.cluster import kind_of_devices

        return kind_of_devices(address)
    from ..workers.devices import torch_builds, visible_gpus, why_no_gpu

    if "cuda" in torch_builds() and visible_gpus():
        return "cuda"
    _say_once(why_no_gpu())
    return "cpu"


@cache
def _say_once(why: str | None) -> None:
    if why is not None:
        tell(f"no GPU is used: {why}")


@contextmanager
def trials(where: Where, task: str, device: Literal["cpu", "cuda"]) -> Iterator[Executor]:
    """An executor. For a command, no signal keeps it from being closed, and nothing that comes of it outlives it.

    Raises:
        UserError: the command was started once a rank; or as :meth:`Where.open`.
    """
    from ..workers.overheard import Overheard
    from ..workers.process import adopt_orphans

    if (size := world_size()) > 1:
        raise UserError(
            f"autotune was started as one of {size} ranks (WORLD_SIZE), but it measures in processes of its own and "
            "runs once, not once a rank. Start it without torchrun, or with WORLD_SIZE=1."
        )
    if where.is_command:
        adopt_orphans()
    with where.open(task, device) as executor:
        try:
            yield Overheard(executor, _hear) if where.verbose else executor
        finally:
            if where.is_command:
                ignore_interrupts()


def _hear(name: str, output: str) -> None:
    """Print what a process of the task's has printed, under its name, which its log has, too."""
    for text in output.splitlines():
        tell(f"{name} | {printable(text)}")
