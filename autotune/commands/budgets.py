"""``autotune search --budget 6GiB,8GiB``: one job, a plan for each budget."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..batch.jobs import Job, Jobs, check_task
from ..errors import UserError
from ..files import FOLDER, check_output
from ..report.printing import listened_to, print_json
from ..search_spaces import load_space
from ..searches.options import SearchOptions
from .batch import WhatToTune, as_document, executors_for, preview, run_jobs, tell_of
from .search import check_asked, kept_measurements
from .where import Where

_NOT_TAKEN = ("storage", "require_proof", "progress")
"""Options that only a search for one budget has."""


def search_budgets(
    options: SearchOptions, budgets: Sequence[str], device: str | None, where: Where, dry_run: bool, json: bool
) -> int:
    """Search for each budget, the largest first: each begins with what the others have measured. Plans are named by
    their budgets: ``plan-6GiB.yaml``.

    Args:
        options: of each search, but for its budget; ``output`` is what the plans' names begin with.
        budgets: as the command line has them.
        device: ``--device``.
        where: what runs the trials.
        dry_run: measure nothing.
        json: print one JSON document.

    Returns:
        The exit code: 0 where every budget has its plan, 130 after a Ctrl-C, else that of one without.

    Raises:
        UserError: a budget is named twice, or an option that only a search for one has was given.
    """
    if given := options.given(_NOT_TAKEN):
        raise UserError(f"--budget {','.join(budgets)}: several cannot be had with {', '.join(given)}. Leave that out.")
    check_asked(options)
    jobs = _jobs(options, budgets, device)
    if options.command is None:
        check_task(options.task)
    load_space(options.space)
    for job in jobs.jobs:
        check_output(job.plan(Path()), {}, UserError)
    what = WhatToTune(Path(options.task), FOLDER / f"{options.stem}-budgets", resume=options.resume)
    results = kept_measurements(options)
    with executors_for(jobs, what.jobs, where, options.device) as executors:
        if dry_run:
            return preview(jobs, what, executors, results, json, options.device)
        found, stop = run_jobs(jobs, what, executors, results, options.device)
    code = tell_of(found, stop.is_set())
    if json:
        print_json({"exit_code": code, **as_document(found)})
    else:
        with listened_to(sys.stdout):
            for run in found.jobs:
                if run.plan is not None:
                    print(run.options.output)
    return code


def _jobs(options: SearchOptions, budgets: Sequence[str], device: str | None) -> Jobs:
    names = [budget.replace(" ", "").replace("%", "-percent") for budget in budgets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--budget {','.join(budgets)}: {twice[0]} is named twice.")
    source = {"command": options.command} if options.command is not None else {"task": options.task}
    output = options.output
    return Jobs(
        jobs=tuple(
            Job(
                name=f"{output.stem}-{name}",
                output=output.with_stem(f"{output.stem}-{name}"),
                device=device,
                **{**source, **options.asked(), "budget": budget},
            )
            for name, budget in zip(names, budgets, strict=True)
        )
    )
