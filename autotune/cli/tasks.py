"""The commands for a task, and for this machine, before a search: ``profile``, ``estimate``, ``init``, ``doctor``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UserError
from ..report.printing import print_json, print_words
from ..searches.options import HowToSearch, SearchOptions
from .app import app, one_document
from .arguments import (
    SEQUENCE,
    Alone,
    Card,
    Cards,
    Depth,
    Device,
    DeviceMemory,
    EstimatedBudget,
    EstimatedTask,
    HfConfig,
    Html,
    Json,
    Lora,
    Output,
    ProfiledBatch,
    ProfiledPlan,
    Sequence,
    TaskPath,
    Techniques,
    Trace,
    Verbose,
)
from .arguments import Job as JobWords
from .options import MayBeAlone, takes_options


@app.command(short_help="Show where a training step's memory and time go, module by module.")
@takes_options(HowToSearch, only=("seed",))
def profile(
    task: TaskPath,
    plan: ProfiledPlan = None,
    batch: ProfiledBatch = None,
    depth: Depth = None,
    alone: Alone = False,
    html: Html = None,
    trace: Trace = None,
    device: Device = None,
    verbose: Verbose = False,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Show, module by module, what one optimizer step keeps, what fills its peak, and what would change that.

    One step of MODEL.PY is traced in a process of its own, then once more with each technique that may change it.
    Ctrl-C leaves out those techniques that have not been measured yet.
    """
    from ..commands.profile import ProfileForm
    from ..commands.profile import profile as command
    from ..commands.where import default_device
    from ..results import WhatToProfile

    what = WhatToProfile(task, device or default_device(), batch=batch, alone=alone, trace=trace, **given)
    with one_document(json):
        raise typer.Exit(command(what, plan, ProfileForm(depth, html, json), verbose))


@app.command(cls=MayBeAlone, short_help="Tell without a device which micro-batch fits, and what fills the memory.")
@takes_options(SearchOptions, only=("space", "effective_batch", "storage"))
def estimate(
    task: EstimatedTask = None,
    hf: HfConfig = None,
    sequence: Sequence = None,
    lora: Lora = None,
    budget: EstimatedBudget = None,
    card: Cards = None,
    device_memory: DeviceMemory = None,
    device: Device = None,
    verbose: Verbose = False,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Tell, for combinations of techniques, the largest micro-batch of MODEL.PY that fits, without running it.

    A training step is traced over fake tensors (shapes without data), in a process of its own for each combination. Its
    allocations are extended to any batch. A model that cannot be traced runs a few small steps instead. Where a search
    has measured this task, its trials calibrate the estimate. Exits with 3 when nothing fits.

    With several cards, --card h100,l40s, or --card alone for all that are known: a row for each, with the largest
    micro-batch of the job as it stands, what binds it, and in what the card computes.

    With --hf config.json --sequence 2048, and --lora, no task file is needed.
    """
    from ..commands.estimate import estimate as one_device
    from ..commands.estimate import what_to_estimate

    with one_document(json):
        task = _task_or_configuration(task, hf, sequence, lora)
        what = what_to_estimate(task, device, device_memory, card, budget_bytes=budget, **given)
        if len(what.cards) > 1:
            from ..commands.cards import estimate_cards

            raise typer.Exit(estimate_cards(what, json, verbose))
        one_device(what, json, verbose)


@app.command(short_help="Write a plan that is predicted to fit a budget, without measuring it.")
@takes_options(SearchOptions, only=("effective_batch", "scratch"))
def fit(
    job: JobWords,
    budget: EstimatedBudget = None,
    card: Card = None,
    device_memory: DeviceMemory = None,
    device: Device = None,
    techniques: Techniques = None,
    output: Output = Path("plan.yaml"),
    verbose: Verbose = False,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Write a plan with which a job is predicted to fit the budget at the least time: which blocks are recomputed,
    whether layers save memory, whether the optimizer steps in backward. The batch, and the arithmetic, stay.

    A training step is traced over fake tensors, in seconds; nothing is trained. A script runs twice, to its first
    steps. `autotune verify` measures the plan, `autotune search --start` goes on from it, `autotune.fit` does the same
    to a model in your own loop. Exits with 3 when nothing fits, with the smallest budget that works.
    """
    from ..commands.estimate import what_to_estimate
    from ..commands.fit import fit as command

    with one_document(json):
        started: dict[str, Any] = {}
        if len(job) > 1:
            from ..script.command import script_name

            started = {"command": tuple(job)}
        elif given.get("scratch", "auto") != "auto":
            raise UserError("--scratch is for a script. Give the command that starts it, behind --.")
        if techniques is not None:
            given["techniques"] = tuple(one.strip() for one in techniques.split(","))
        task = script_name(job) if started else job[0]
        what = what_to_estimate(task, device, device_memory, card, budget_bytes=budget, **started, **given)
        if len(what.cards) > 1:
            raise UserError(f"--card: a plan is for one card, but got {len(what.cards)}. Name one.")
        command(what, output, json, verbose)


def _task_or_configuration(task: str | None, hf: Path | None, sequence: int | None, lora: int | None) -> str:
    """The task file that is named, or one that is written for a configuration."""
    if (task is None) == (hf is None):
        got = "neither" if task is None else "both"
        raise UserError(
            f"a task file, or --hf with a configuration of transformers, was expected, but got {got}. `autotune init` "
            "writes a task file."
        )
    if hf is None:
        given = [name for name, value in (("--sequence", sequence), ("--lora", lora)) if value is not None]
        if given:
            raise UserError(f"{', '.join(given)}: only with --hf. A task file says itself what its samples are.")
        assert task is not None, "else it is refused above"
        return task
    from ..commands.starter import write_task

    return write_task(hf, sequence or SEQUENCE, lora)


@app.command(short_help="Write a commented task file that runs.")
def init(
    path: Annotated[Path, typer.Argument(metavar="MODEL.PY", help="The file to write; it must not exist.")] = Path(
        "model.py"
    ),
) -> None:
    """Write a commented task file that runs as it stands, to be filled with your own model and data."""
    from ..commands.starter import write_starter

    write_starter(path)
    print(path)
    print(f"Next: put your model in, then `autotune search {path} --budget 2GiB`.", file=sys.stderr)


@app.command(short_help="Tell what this machine offers and lacks.")
def doctor(json: Json = False) -> None:
    """Tell what this machine offers: devices, memory, versions, allocators; what is missing and how to get it."""
    from ..report.doctor import examine, explain

    found = examine()
    if json:
        print_json(found)
    else:
        print_words(sys.stdout, explain(found))
