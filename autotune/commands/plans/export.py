"""``autotune export``: what a plan for inference computes, as a file for other runtimes."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from ...distribution import requirement
from ...errors import Interrupted, NothingFits, OutputsDiffer, PlanError, TaskError, UserError
from ...files import check_output, replacing
from ...measure.exports.types import ExportedFile, ExportOptions, missing_for_onnx
from ...plan import Plan, load_plan
from ...report.export import as_json, explain
from ...report.printing import print_json, print_words, tell
from ...searches.requests import failure
from ...task_file import task_file
from ...techniques import FileKind
from ...workers import STOPPED, Executor, Exported, ExportRequest, Failed, OutOfMemory
from ...workers.trial.environment import own_thread_variables
from ..interrupts import interrupts
from ..verify import job_of
from ..where import Where, default_device, trials

_DEADLINE_S = 3600.0


def export(path: Path, task: str | None, to: FileKind, out: Path | None, verbose: bool, json: bool) -> None:
    """Write a plan's model as a file, and print how it compares. What is not as it should be is not kept.

    Args:
        path: the plan.
        task: its task file; None is the one that it names, next to it.
        to: the format.
        out: where the file goes; None is beside the plan, by its name.
        verbose: show what the task prints.
        json: print one JSON document.

    Raises:
        UserError: the plan trains, a package is missing, the file cannot be written, or the model cannot be exported.
        OutputsDiffer: its outputs are beyond the plan's tolerance.
    """
    plan = load_plan(path)
    if plan.inference is None:
        raise PlanError(
            f"{path}: the plan is for training, and a file holds what infers. `autotune search --inference` finds a "
            "plan of a task's infer."
        )
    if to == "onnx" and (missing := missing_for_onnx()):
        raise UserError(
            f"{', '.join(missing)}: not installed, which --to onnx needs. Install it: pip install "
            f"{requirement('onnx')}. --to pt2 needs nothing."
        )
    plan = plan.on(default_device())
    task, _, _ = job_of(plan, [task] if task else None, path, "export")
    file = out or path.with_suffix(f".{to}")
    check_output(file, {"the task": task_file(task), "the plan": path}, UserError, "--out")
    is_new = not file.exists()
    tell(f"runs {task} with {path}")
    stop, device = threading.Event(), plan.budget.device
    assert device is not None, "set above"
    with (
        trials(Where("local", verbose=verbose), task, device) as executor,
        interrupts(stop, executor.close),
        replacing(file, UserError, "--out") as beside,
    ):
        found = export_plan(plan, task, ExportOptions(to=to, file=str(beside.absolute())), executor)
    if not is_new:
        tell(f"{file}: replaced")
    if json:
        print_json({"path": str(path), "task": task, "file": str(file), "to": to, **as_json(found, plan, to)})
    else:
        print_words(sys.stdout, explain(found, plan, file, to))


def export_plan(plan: Plan, task: str, options: ExportOptions, executor: Executor) -> ExportedFile:
    """Have a process write a file and compare it.

    Args:
        plan: for inference, with its device.
        task: ``model.py`` or ``model.py:name``.
        options: the file.
        executor: runs it; stays the caller's to close.

    Raises:
        TaskError: the task cannot be loaded or exported.
        NothingFits: memory ran out.
        OutputsDiffer: the file's outputs are beyond the plan's tolerance.
        Interrupted: the executor was closed.
    """
    assert plan.budget.device is not None, "the caller says where"
    outcome = executor.ask(
        ExportRequest(
            id="export",
            task=os.path.abspath(task),
            seed=plan.search.seed if plan.search else 0,
            device=plan.budget.device,
            plan=plan,
            options=options,
            deadline_s=_DEADLINE_S,
            environment=own_thread_variables(),
        )
    )
    if outcome == STOPPED:
        raise Interrupted("Interrupted before the file was whole: nothing was written.")
    if isinstance(outcome, OutOfMemory):
        raise NothingFits(f"{task}: the plan does not fit on this device: {failure(outcome)}")
    if isinstance(outcome, Failed) and not outcome.traceback:
        raise PlanError(outcome.message)
    if not isinstance(outcome, Exported):
        raise TaskError(f"{task}: the plan cannot be exported: {failure(outcome)}")
    if (unlike := next((run.unlike for run in outcome.file.runs if run.unlike is not None), None)) is not None:
        raise OutputsDiffer(f"{task}: {unlike}. The file was removed.")
    return outcome.file
