"""What each command does, once its options are parsed. Imports what it needs when it is needed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from .errors import TaskError, UserError
from .files import check_output, replacing, write_text
from .interrupts import ignore_interrupts, interrupts
from .plan import load_plan
from .ranks import world_size
from .report.printing import console, escaped, listened_to, print_json, print_words
from .search.options import SearchOptions
from .task import refuse_script, split_source, task_file

if TYPE_CHECKING:
    from .plan import Plan
    from .search.estimate import Combination, WhatToEstimate
    from .search.events import Event
    from .search.profile import Change, WhatToProfile
    from .search.verify import Verification
    from .techniques import Facts, Settings
    from .workers import Executor

__all__ = [
    "ProfileForm",
    "Where",
    "default_device",
    "doctor",
    "estimate",
    "preview",
    "profile",
    "run",
    "search",
    "show",
    "verify",
]

_INTERRUPTED = 130


@dataclass(frozen=True)
class Where:
    """Where trials run, and whether they are heard."""

    executor: Literal["local", "ray"]
    address: str | None = None
    """A Ray cluster's; None is this machine."""
    verbose: bool = False
    """Show on stderr what the task prints."""

    def open(self, task: str, device: Literal["cpu", "cuda"]) -> Executor:
        """An executor; the caller closes it.

        Raises:
            UserError: no such task file, or nothing of a task in it; Ray is asked for and is not installed, or
                ``address`` is given without it.
        """
        path, _ = split_source(task)  # first, since an executor takes seconds to start
        refuse_script(task)
        if self.executor == "local":
            if self.address is not None:
                raise UserError("--address names a Ray cluster, but --executor is local. Leave one of them out.")
            from .workers.local import LocalExecutor

            return LocalExecutor(device=device)
        from .workers.cluster import RayExecutor

        return RayExecutor(device=device, address=self.address, working_dir=path.parent)


@dataclass(frozen=True)
class ProfileForm:
    """How a profile is shown."""

    depth: int | None = None
    """Levels of modules of the table; None is as many as fit a screen."""
    html: Path | None = None
    """Where the page goes; None writes none."""
    json: bool = False
    """Print one JSON document."""


def default_device() -> Literal["cpu", "cuda"]:
    """``cuda`` where this machine shows a GPU and torch is built for it, found without importing torch."""
    from .workers.devices import visible_gpus

    return "cuda" if not version("torch").endswith("+cpu") and visible_gpus() else "cpu"


def search(options: SearchOptions, where: Where, json: bool) -> int:
    """Run a search and print the plan's path, or one JSON document.

    Returns:
        The exit code: 0, or 130 after a Ctrl-C.
    """
    from .report.live import watching
    from .report.show import as_json, summary
    from .search.pace import Pace

    refuse_script(options.task)  # before anything is said of reading it
    stop = threading.Event()
    pace = Pace(options.trial_time_s, options.max_time_s)  # the executor's start is in the time that was given
    try:
        with (
            watching(options, console(sys.stderr)) as display,
            _trials(where, options.task, options.device) as executor,
            interrupts(stop, executor.close, display.interrupted),
        ):
            from .search.driver import search as run_search  # it takes a moment, and something is shown by now

            plan = run_search(options, executor, display.observe, stop, pace)
    except KeyboardInterrupt:
        _tell("Stopped without a plan. Every trial that ended is kept: --resume goes on from there.")
        return _INTERRUPTED
    code = _INTERRUPTED if stop.is_set() else 0
    with suppress(OSError):  # the plan is written, whoever listens
        print_words(sys.stderr, summary(plan, options.output))
    if json:
        stopped = plan.search.stopped if plan.search else None
        print_json({"exit_code": code, "path": str(options.output), "stopped": stopped, "plan": as_json(plan)})
    else:
        with listened_to(sys.stdout):
            print(options.output)
    return code


def preview(options: SearchOptions, where: Where, json: bool) -> int:
    """Print what a search would try, and return 0."""
    _tell(f"reading the task: {options.task}; no trial is run")
    from .report.preview import as_json, explain
    from .search.preview import preview as run_preview

    with _trials(where, options.task, options.device) as executor:
        found = run_preview(options, executor)
    if json:
        print_json(as_json(found))
    else:
        print_words(sys.stdout, explain(found, options))
    return 0


def show(path: Path, json: bool) -> None:
    """Print a plan in words, or as JSON."""
    from .report.show import as_json, explain

    plan = load_plan(path)
    if json:
        print_json({"path": str(path), "plan": as_json(plan)})
    else:
        print_words(sys.stdout, explain(plan, path))


def verify(path: Path, task: str | None, where: Where, trial_time_s: float, json: bool) -> Verification:
    """Measure a plan again and print what was found.

    Args:
        path: the plan.
        task: None is the plan's own, beside the plan.
        where: what runs it.
        trial_time_s: the time share of each repeat's timed windows, seconds.
        json: print one JSON document.
    """
    from .report.verification import as_json, explain, line
    from .search.verify import verify as run_verify

    plan = load_plan(path).on(default_device())
    task = task or _beside(path, plan)
    _tell(f"runs {task} with {path}")

    def observe(event: Event) -> None:
        said = line(event, plan)
        if said is not None:
            _tell(said)

    assert plan.budget.device is not None, "set above"
    with _trials(where, task, plan.budget.device) as executor:
        found = run_verify(plan, task, executor, observe, trial_time_s)
    if json:
        print_json({"path": str(path), "task": task, **as_json(found, plan)})
    else:
        print_words(sys.stdout, explain(found, plan))
    return found


def profile(what: WhatToProfile, plan: Path | None, form: ProfileForm, verbose: bool) -> int:
    """Profile a task, print what was found, and write the files that were asked for.

    Args:
        what: the task and what to do with it; its ``trace`` is where the Chrome trace is to be in the end.
        plan: the plan to put in force; None is the job as it stands.
        form: what is printed and written.
        verbose: show what the task prints.

    Returns:
        The exit code: 0, or 130 after a Ctrl-C.

    Raises:
        UserError: a file cannot be written, said before anything runs; or as :func:`autotune.search.profile.profile`.
    """
    from .report.page import page
    from .report.profile import WIDTH, as_json, explain, line
    from .search.profile import profile as run_profile
    from .techniques import Facts

    taken = {"the task": task_file(what.task), "the plan": plan}
    for option, path, other in (("--html", form.html, what.trace), ("--trace", what.trace, None)):
        if path is not None:
            check_output(path, {**taken, "the other output": other}, UserError, option)
    _tell(f"reading the task: {what.task}")
    told: list[Facts] = []

    def observe(event: Facts | Settings | Change) -> None:
        _tell(line(event, *told))
        told.extend([event] if isinstance(event, Facts) else [])

    in_force = load_plan(plan) if plan else None
    stop = threading.Event()
    with (
        _trials(Where("local", verbose=verbose), what.task, what.device) as executor,
        interrupts(stop, executor.close),
        replacing(what.trace, UserError, "--trace") if what.trace else nullcontext() as trace,
    ):
        found = run_profile(replace(what, plan=in_force, trace=trace), executor, observe)
    code = _INTERRUPTED if stop.is_set() else 0
    if form.html is not None:
        write_text(form.html, page(found, form.depth), UserError, "--html")
    if form.json:
        files = {"html": form.html and str(form.html), "trace": what.trace and str(what.trace)}
        print_json({"exit_code": code, **files, **as_json(found)})
    else:
        print_words(sys.stdout, explain(found, form.depth), WIDTH)
    return code


def estimate(what: WhatToEstimate, json: bool, verbose: bool) -> None:
    """Estimate a task's memory, and print the largest micro-batches.

    Args:
        what: the task, and the device that is planned for.
        json: print one JSON document.
        verbose: show what the task prints.

    Raises:
        UserError: ``--device-memory`` with ``--device cpu``, or a CUDA device is planned for and its memory not said;
            or as :func:`autotune.search.estimate.estimate`.
    """
    from .report.estimate import WIDTH, as_json, explain, line
    from .search.estimate import estimate as run_estimate
    from .techniques import Facts

    if what.device == "cpu" and what.device_memory_bytes is not None:
        raise UserError("--device-memory is of a CUDA device, but --device is cpu. Leave one of them out.")
    if what.device == "cuda" and what.limit_bytes is None:
        raise UserError("--device cuda: how much may be taken? Give --budget or --device-memory, such as 24GiB.")
    _tell(f"reading the task: {what.task}")
    told: list[Facts] = []

    def observe(event: Facts | Combination) -> None:
        _tell(line(event, *told))
        told.extend([event] if isinstance(event, Facts) else [])

    with _trials(Where("local", verbose=verbose), what.task, "cpu") as executor:
        found = run_estimate(what, executor, observe)
    if json:
        print_json(as_json(found))
    else:
        print_words(sys.stdout, explain(found), WIDTH)


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


def doctor(json: bool) -> None:
    """Print what this machine offers."""
    from .report.doctor import examine, explain

    found = examine()
    if json:
        print_json(found)
    else:
        print_words(sys.stdout, explain(found))


def _beside(path: Path, plan: Plan) -> str:
    """The plan's own task: below the plan's folder as it is named, or beside the plan. A plan runs no other file.

    Raises:
        UserError: there is none.
    """
    if plan.task is None:
        raise UserError(f"{path}: it names no task. Give it: `autotune verify {path} model.py`.")
    folder, source = path.parent, plan.task.source
    for candidate in (str(folder / source), str(folder / Path(source).name)):
        try:
            file, _ = split_source(candidate)
        except TaskError:
            continue
        if file.resolve().is_relative_to(folder.resolve()):
            return candidate
    raise UserError(f"{path}: its task {source} is not beside it. Give it: `autotune verify {path} path/to/model.py`.")


@contextmanager
def _trials(where: Where, task: str, device: Literal["cpu", "cuda"]) -> Iterator[Executor]:
    """An executor. No signal keeps it from being closed, and nothing that comes of it outlives it.

    Raises:
        UserError: the command was started once a rank; or as :meth:`Where.open`.
    """
    from .workers.orphans import adopt_orphans
    from .workers.overheard import Overheard

    if (size := world_size()) > 1:
        raise UserError(
            f"autotune was started as one of {size} ranks (WORLD_SIZE), but it measures in processes of its own and "
            "runs once, not once a rank. Start it without torchrun, or with WORLD_SIZE=1."
        )
    adopt_orphans()
    with where.open(task, device) as executor:
        try:
            yield Overheard(executor, _hear) if where.verbose else executor
        finally:
            ignore_interrupts()


def _hear(name: str, output: str) -> None:
    """Print what a process of the task's has printed, under its name, which its log has, too."""
    from .report.words import printable

    for text in output.splitlines():
        _tell(f"{name} | {printable(text)}")


def _tell(progress: str) -> None:
    """Print a line of progress; a reader that has gone ends nothing."""
    with suppress(OSError):
        print(escaped(progress), file=sys.stderr)
