"""The commands that search: ``search`` and ``batch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ..errors import UserError
from ..searches.options import SearchedJob, SearchOptions
from .app import app, one_document
from .arguments import (
    Address,
    Devices,
    DryRun,
    ExecutorName,
    JobsAddress,
    JobsPath,
    JobsServer,
    Json,
    PlansFolder,
    ResultsStorage,
    ResumeBatch,
    Verbose,
    WaitForJobs,
)
from .arguments import Job as JobWords
from .options import ByPanel, takes_options


@app.command(cls=ByPanel, short_help="Search for the fastest plan within a memory budget.")
@takes_options(SearchOptions, SearchedJob, several=("budget",))
def search(
    job: JobWords,
    executor: ExecutorName = "ray",
    address: Address = None,
    devices: Devices = None,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Find the fastest configuration of a job that stays within the budget, and write it as a plan.

    The job is a task file, or a training script of your own, unedited: after -- comes the command that starts it, with
    {batch.micro=32} and {batch.accumulate=1} where its own flags take them.

    Of several budgets, --budget 6GiB,8GiB, each has a plan of its own, plan-6GiB.yaml, and what is measured counts for
    all.

    Ctrl-C once finishes the running trials and writes the best so far; twice stops at once.
    """
    from ..commands.where import Where, default_device
    from ..workers.devices import split_device

    device = given.pop("device", None)
    kind, device_name = split_device(device or default_device(address))
    is_script = len(job) > 1
    if is_script:
        from ..script.command import script_name
    if devices is not None:
        given.setdefault("output", Path("bundle"))
    budgets = given.pop("budget", "").split(",")
    if len(budgets) == 1 and budgets[0]:
        given["budget"] = budgets[0]
    options = SearchOptions(
        task=script_name(job) if is_script else job[0], command=tuple(job) if is_script else None, device=kind, **given
    )
    with one_document(json):
        where = Where(executor, address, is_script, verbose, device_name)
        if len(budgets) > 1 and devices is None:
            from ..commands.budgets import search_budgets

            raise typer.Exit(search_budgets(options, budgets, device, where, dry_run, json))
        if devices is not None:
            from ..commands.devices.search import search_devices

            if len(budgets) > 1:
                raise UserError("--devices takes one --budget; behind a type stands that type's own: cuda:A100=70GiB.")
            if device is not None:
                raise UserError("--device is of one type, and --devices of several. Leave one of them out.")
            raise typer.Exit(search_devices(options, devices, where, dry_run, json))
        if dry_run:
            from ..commands.preview import preview as command
        else:
            from ..commands.search import search as command
        raise typer.Exit(command(options, where, json))


@app.command(short_help="Search for the plans of many jobs that share devices.")
def batch(
    jobs: JobsPath,
    output: PlansFolder = Path("plans"),
    executor: ExecutorName = "ray",
    address: JobsAddress = None,
    storage: ResultsStorage = None,
    resume: ResumeBatch = False,
    dry_run: DryRun = False,
    server: JobsServer = None,
    wait: WaitForJobs = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Search for the plans of many jobs that share devices, and what they measure.

    JOBS.YAML lists them: {jobs: [{name: a, task: model.py, budget: 8GiB}, {name: b, task: model.py, budget: 4GiB}]}.
    Each also takes command (in place of task), priority, output (of its plan), device, and each option of `autotune
    search` in the groups Budget to Quality of its help, scratch and ablate: with _ for -, as in max_time.

    Each free device goes to the trial, over all jobs, that is expected to gain the most for each second, times the
    job's priority. Jobs of one task begin with what the others measured, today or earlier, once one configuration was
    measured again and agrees. A job that fails stops no other. Exits with 0 when every job has its plan.

    Ctrl-C once finishes the running trials and writes the best so far of each job; twice stops at once.

    With --server each job becomes a search of a service, as by `autotune submit`: the current folder is sent, ids are
    printed, and the same list submitted again makes no search twice. AUTOTUNE_TOKEN is the token.
    """
    with one_document(json):
        if server is not None:
            others = {"--executor": executor != "ray", "--address": address, "--storage": storage, "--verbose": verbose}
            _refuse_here({"--dry-run": dry_run, **others})
            raise typer.Exit(_submit_jobs(server, jobs, output, resume, wait, json))
        if wait:
            raise UserError("--wait: only with --server. A batch on this machine ends when its jobs have.")
        from ..commands.batch import WhatToTune
        from ..commands.batch import batch as command
        from ..commands.where import Where

        where = Where(executor, address, verbose=verbose)
        raise typer.Exit(command(WhatToTune(jobs, output, storage, resume), where, dry_run, json))


def _refuse_here(given: dict[str, object]) -> None:
    """Raises:
    UserError: an option that says how trials run on this machine was given.
    """
    named = [option for option, value in given.items() if value]
    if "--dry-run" in named:
        raise UserError(
            "--dry-run: a service tells nothing of a search before it runs. Leave out --server, and this machine does."
        )
    if named:
        raise UserError(f"{', '.join(named)}: with --server, the service decides how trials run. Leave it out.")


def _submit_jobs(url: str, jobs: Path, output: Path, resume: bool, wait: bool, json: bool) -> int:
    from .remote import asking

    with asking(url) as client:
        from ..commands.service.batch import WhatToSubmit, batch

        return batch(client, WhatToSubmit(jobs, output, resume, wait), json)
