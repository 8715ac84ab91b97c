"""The commands for what a search has left: ``show``, ``report``, ``verify``, ``run`` and ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..searches.options import HowToSearch
from .app import app, one_document
from .arguments import (
    Address,
    Enforce,
    ExecutorName,
    ExportedTask,
    ExportedTo,
    ExportOutput,
    Framework,
    Json,
    PlanPath,
    ReportOutput,
    Strict,
    StrictRun,
    StudyName,
    StudyPath,
    Verbose,
    VerifiedJob,
)
from .options import takes_options


@app.command(short_help="Explain a plan in words.")
def show(plan: PlanPath, framework: Framework = None, json: Json = False) -> None:
    """Explain a plan in words: what each row does, what it was measured at, and how to apply it."""
    from ..commands.plans.show import show as command

    with one_document(json):
        command(plan, json, framework)


@app.command(short_help="Write a page of what a search tried and found.")
def report(
    study: StudyPath, output: ReportOutput = Path("report.html"), name: StudyName = None, json: Json = False
) -> None:
    """Write one page, which needs no network: speed against memory, what each choice of the plan bought, predicted
    against measured, every trial, and the plan.

    Without --storage a search keeps its study in .autotune/, in a file that is named after the task. What choices
    bought is measured by `autotune search --ablate`; nothing is measured here. A search that still runs may be read.
    """
    from ..commands.report import report as command

    with one_document(json):
        command(study, name, output, json)


@app.command(short_help="Measure a plan again.")
@takes_options(HowToSearch, only=("trial_time", "scratch"))
def verify(
    plan: PlanPath,
    job: VerifiedJob = None,
    strict: Strict = False,
    executor: ExecutorName = "ray",
    address: Address = None,
    verbose: Verbose = False,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Measure a plan again. Exits with 0 when it holds, 3 when it is over its budget, 2 for another model.

    The plan of a script is verified by the command that starts it, behind --.
    """
    from ..commands.verify import verify as command
    from ..commands.where import Where

    with one_document(json):
        found = command(plan, job, Where(executor, address, len(job or ()) > 1, verbose), HowToSearch(**given), json)
    if not found.holds or (strict and found.slower):
        raise typer.Exit(3)


@app.command(
    short_help="Start a job as its plan needs it.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def run(
    plan: PlanPath,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The job, such as python train.py.")],
    strict: StrictRun = False,
    enforce: Enforce = False,
) -> None:
    """Start a job with a plan applied: a script that Python runs needs no change; one line says what is applied.

    {batch.micro} and {batch.accumulate} in the command stand for the plan's. What a script makes impossible ends it
    with 2 and the reason. A job that applies its plan itself finds it by AUTOTUNE_PLAN, and is left to it.
    """
    from ..commands.plans.run import run as start

    start(plan, command[1:] if command[0] == "--" else command, strict, enforce)


@app.command(short_help="Write a plan's model for onnxruntime, or for torch.export.load.")
def export(
    plan: PlanPath,
    task: ExportedTask = None,
    to: ExportedTo = ...,  # type: ignore[assignment]  # typer's word for what must be given
    out: ExportOutput = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Write what a plan for inference computes: infer(model, batch), with the model's weights, as a file.

    The file is read back in a process of its own and run on some of the task's batches. Its outputs are held against
    those of the job as it stands, under the plan's tolerance, and of the plan's own model, closer by: exits with 3
    where they differ by more, and keeps no file. Batch size, compiled kernels, loader and allocator are in no file.
    """
    from ..commands.plans.export import export as command

    with one_document(json):
        command(plan, task, to, out, verbose, json)
