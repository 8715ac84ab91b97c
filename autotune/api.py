"""``autotune.search``, ``verify`` and ``estimate``: the commands from Python, for notebooks and sweeps.

They take the options of the command line as keywords, with ``_`` for ``-``. In a notebook they say what happens;
elsewhere they print nothing. Signals stay the caller's, but for Ctrl-C while trials run in the main thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from .commands.estimate import estimate_task, inspected_on, what_to_estimate
from .commands.interrupts import interrupts
from .commands.search import check_asked, search_on
from .commands.verify import job_of, verify_plan
from .commands.where import Where, default_device, trials
from .errors import UserError
from .plain_yaml import explain
from .plan import Plan, load_plan
from .report.displays.live import saying
from .report.printing import console
from .results import Estimation, Verification
from .script.command import script_name
from .searches.event_base import Event
from .searches.options import HowToSearch, SearchOptions, read_bytes
from .workers import Executor
from .workers.devices import split_device

ExecutorName = Literal["local", "ray"]


def search(
    task: str | Path | Sequence[str], *, executor: ExecutorName = "ray", address: str | None = None, **options: Any
) -> Plan:
    """Find the fastest configuration of a job that stays within a budget, and write it as a plan.

    ``autotune.search("model.py", budget="8GiB", max_time="20m")`` is ``autotune search model.py --budget 8GiB
    --max-time 20m``. The first Ctrl-C finishes the running trials and writes the best so far.

    Args:
        task: ``model.py`` or ``model.py:name``; or, as several words, the command that starts a script.
        executor: what runs the trials, each in its own process.
        address: ``HOST:PORT`` of a Ray cluster; None is one of its own on this machine.
        **options: of ``autotune search``: ``budget="8GiB"``, ``trials=12``, ``output="plan.yaml"``.

    Returns:
        The plan, as it was written to ``output``.

    Raises:
        UserError: an unknown option or a value that it does not take; or as :func:`autotune.searches.driver.search`.
    """
    words = [str(task)] if isinstance(task, str | Path) else [str(word) for word in task]
    kind, name = _device(options.pop("device", None), address)
    is_script = len(words) > 1
    stated = {
        "task": script_name(words) if is_script else words[0],
        "command": tuple(words) if is_script else None,
        "device": kind,
    }
    asked = _read(SearchOptions, {**stated, **options})
    check_asked(asked)
    where = Where(executor, address, is_script, device_name=name, is_command=False).for_search(asked)
    with _said(asked) as observe, _running(where, asked.task, kind) as (opened, stop):
        return search_on(asked, opened, observe, stop)


def verify(
    plan: Plan | str | Path,
    task: str | Path | Sequence[str] | None = None,
    *,
    executor: ExecutorName = "ray",
    address: str | None = None,
    **options: Any,
) -> Verification:
    """Measure a plan again, in three fresh processes.

    Args:
        plan: the plan, or its file.
        task: as of :func:`search`; None is the plan's own task, beside its file.
        executor: what runs it.
        address: ``HOST:PORT`` of a Ray cluster.
        **options: ``trial_time`` and, of a script, ``scratch``.

    Raises:
        UserError: an unknown option, or the plan cannot be had here.
    """
    path = None if isinstance(plan, Plan) else Path(plan)
    found = plan if isinstance(plan, Plan) else load_plan(plan)
    if found.budget.device is None:
        found = found.on(default_device(address))
    asked = _read(HowToSearch, options)
    words = None if task is None else [str(task)] if isinstance(task, str | Path) else [str(word) for word in task]
    source, command, _ = job_of(found, words, path)
    device = found.budget.device
    assert device is not None, "set above"
    where = Where(executor, address, command is not None, is_command=False).for_plan(found, command)
    with _running(where, source, device) as (opened, _):
        return verify_plan(found, source, opened, lambda words: None, asked.trial_time, command, asked.scratch)


def estimate(
    task: str | Path,
    *,
    budget: str | int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    device_memory: str | int | None = None,
    card: str | None = None,
    **options: Any,
) -> Estimation:
    """Tell, for combinations of techniques, the largest micro-batch that fits, without running the task.

    Args:
        task: ``model.py`` or ``model.py:name``.
        budget: bytes, or ``"8GiB"``; None is all of the device's memory.
        device: type of the device that is planned for; None is cuda with ``device_memory`` or ``card``, else this
            machine's.
        device_memory: of a CUDA device, which need not be here.
        card: the name of one, such as ``"h100"``, in place of its memory.
        **options: ``space``, ``effective_batch`` and ``storage``.

    Raises:
        UserError: an unknown option, a size that is none, or not one card.
        NothingFits: no combination fits at a micro-batch of 1.
    """
    asked = _read(SearchOptions, {"task": str(task), **options})
    sizes = [_bytes(name, size) for name, size in (("budget", budget), ("device_memory", device_memory))]
    given = {name: getattr(asked, name) for name in ("space", "effective_batch", "storage")}
    what = what_to_estimate(asked.task, device, sizes[1], card, budget_bytes=sizes[0], **given)
    if len(what.cards) > 1:
        raise UserError(f"card: one was expected, but got {card!r}. Call autotune.estimate once for each.")
    with _running(Where("local", is_command=False), what.task, inspected_on(what)) as (opened, _):
        return estimate_task(what, opened, lambda event: None)


def _read(model: type[Any], given: Mapping[str, Any]) -> Any:
    """Raises:
    UserError: an unknown option, or a value that it does not take.
    """
    try:
        return model(**given)
    except ValidationError as error:
        raise UserError(explain(error, "autotune", model)) from None


def _device(text: str | None, address: str | None) -> tuple[Literal["cpu", "cuda"], str | None]:
    try:
        return split_device(text or default_device(address))
    except ValueError as error:
        raise UserError(f"device: {error}") from None


def _bytes(name: str, size: str | int | None) -> int | None:
    try:
        return None if size is None else read_bytes(size)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


@contextmanager
def _running(where: Where, task: str, device: Literal["cpu", "cuda"]) -> Iterator[tuple[Executor, threading.Event]]:
    """An executor, and an event that the first Ctrl-C sets: in the main thread, which alone is told of one."""
    stop = threading.Event()
    is_told = threading.current_thread() is threading.main_thread()
    with trials(where, task, device) as executor, interrupts(stop, executor.close) if is_told else nullcontext():
        yield executor, stop


@contextmanager
def _said(options: SearchOptions) -> Iterator[Callable[[Event], None]]:
    """In a notebook a line for each thing that happens."""
    output = console(sys.stdout)
    if not output.is_jupyter:
        yield lambda event: None
        return
    with saying(options, output) as display:
        yield display.observe
