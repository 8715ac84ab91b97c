"""``autotune batch --server``: each job of a list is a search of a service."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...batch.jobs import FOLDER, SUMMARY, Job, Jobs, load_jobs
from ...batch.result import JobResult, State, write_summary
from ...errors import UserError
from ...files import check_output
from ...plain_yaml import explain
from ...plan import load_plan
from ...report.printing import tell
from ...service.client import Client, ServiceError
from ...service.spec import SearchSpec
from ...service.store.states import RESUMABLE, TERMINAL
from ...task_file import split_source
from ...words import count
from .searches import exit_code, print_searches, row

_LOOK_S = 1.0
"""Seconds between two looks at the searches."""
_STATES: dict[str, State] = {"NOTHING_FITS": "nothing fits", "CANCELLED": "interrupted"}
"""A batch's words for what came of a search; all others have failed, or have a plan."""
_ANY = "0" * 64
"""Stands for the archive while the list is checked."""


@dataclass(frozen=True)
class WhatToSubmit:
    """What the user asked for. Every field is a command-line argument of ``autotune batch --server``."""

    jobs: Path
    """``jobs.yaml``."""
    folder: Path = FOLDER
    """``--output``: where plans and the summary go."""
    resume: bool = False
    """``--resume``: go on with what was submitted before, and has failed or was cancelled."""
    wait: bool = False
    """``--wait``: until all have ended, and fetch their plans."""


def batch(client: Client, what: WhatToSubmit, json: bool) -> int:
    """Submit every job of a list, with the current folder; a job that was submitted before is found again.

    Returns:
        The exit code: 0, or with ``wait`` that of a job without a plan.

    Raises:
        UserError: the list has a fault, or what no service can do. Nothing was submitted.
        ServiceError: the service refused, or cannot be reached.
    """
    jobs = load_jobs(what.jobs, what.folder)
    specs = _specs(jobs, what.jobs)
    for path in [what.folder / SUMMARY, *(job.plan(what.folder) for job in jobs.jobs)] if what.wait else []:
        check_output(path, {}, UserError)
    searches = _submit(client, specs, _not_sent(jobs, what))
    if what.resume:
        searches = [client.resume(each["id"]) if each["state"] in RESUMABLE else each for each in searches]
    if not what.wait:
        print_searches(searches, json)
        return 0
    try:
        searches = _follow(client, dict(zip((each["id"] for each in searches), jobs.jobs, strict=True)), what)
    except (KeyboardInterrupt, ServiceError):
        tell("The searches go on: the same command follows them again, `autotune cancel` ends one.")
        raise
    return _conclude(jobs, searches, what, json)


def _specs(jobs: Jobs, path: Path) -> list[SearchSpec]:
    """Raises:
    UserError: what no service can do; every problem on a line of its own.
    """
    found, problems = [], []
    for place, job in enumerate(jobs.jobs):
        where = f"{path}: jobs.{place} ({job.name})"
        try:
            found.append(_spec(job))
        except ValidationError as error:
            problems.append(explain(error, where, SearchSpec))
        except UserError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise UserError("\n".join([*problems, "Nothing was submitted. Without --server, the batch runs here."]))
    return found


def _spec(job: Job) -> SearchSpec:
    task = None
    if job.task is not None:
        source, name = split_source(job.task)
        task = _inside(source) if name is None else f"{_inside(source)}:{name}"
    space = _inside(Path(job.space)) if Path(job.space).is_file() else job.space
    return SearchSpec(
        archive=_ANY,
        name=job.name,
        task=task,
        command=job.command,
        device=job.device,
        priority=round(100 * job.priority / (1 + job.priority)),
        **{**job.asked(), "space": space},
    )


def _inside(path: Path) -> str:
    """A path as the service finds it.

    Raises:
        UserError: it is not sent.
    """
    if not path.resolve().is_relative_to(Path.cwd()):
        raise UserError(
            f"{path}: a file in {Path.cwd()} was expected: the folder that the batch is started in is sent, and what "
            "lies outside is not. Start it in a folder that holds all files of the jobs."
        )
    return path.resolve().relative_to(Path.cwd()).as_posix()


def _not_sent(jobs: Jobs, what: WhatToSubmit) -> frozenset[Path]:
    """The list, and what a batch writes: with them, no list would be the same once a plan was fetched."""
    paths = [what.jobs, what.folder, what.folder / SUMMARY, *(job.plan(what.folder) for job in jobs.jobs)]
    return frozenset(path.resolve() for path in paths)


def _submit(client: Client, specs: Sequence[SearchSpec], not_sent: frozenset[Path]) -> list[dict[str, Any]]:
    """A search has a key that is made of all that it is, its files too: what is asked for again is found."""
    archive, found = client.put_folder(Path.cwd(), not_sent), []
    for spec in (each.model_copy(update={"archive": archive}) for each in specs):
        key = f"batch-{hashlib.sha256(spec.model_dump_json().encode()).hexdigest()}"
        try:
            found.append(client.submit(key=key, **spec.model_dump(mode="json", exclude_none=True)))
        except ServiceError:
            if found:
                tell(f"{len(found)} of {count(len(specs), 'job')} were submitted. The same command submits the rest.")
            raise
    return found


def _follow(client: Client, jobs: dict[str, Job], what: WhatToSubmit) -> list[dict[str, Any]]:
    """Say what changes until all have ended, and fetch each plan as it is there.

    Args:
        client: of the service.
        jobs: by the ids of their searches.
        what: where plans go.

    Returns:
        The searches, in the order of the jobs.
    """
    found: dict[str, dict[str, Any]] = {}
    said: dict[str, Any] = {}
    while wanted := {each for each in jobs if each not in found or found[each]["state"] not in TERMINAL}:
        if found:
            time.sleep(_LOOK_S)
        for search in _look(client, wanted):
            name = search["id"]
            found[name] = search
            now = (search["state"], search["message"], search["summary"].get("num_ended"))
            if said.get(name) != now:
                said[name] = now
                tell(row(search))
            if search["state"] == "SUCCEEDED":
                client.fetch(name, jobs[name].plan(what.folder))
    return [found[name] for name in jobs]


def _look(client: Client, wanted: set[str]) -> Iterator[dict[str, Any]]:
    """Raises:
    ServiceError: one is no longer there.
    """
    left = set(wanted)
    for search in client.searches():
        if search["id"] in left:
            left.remove(search["id"])
            yield search
        if not left:
            return
    raise ServiceError(f"search {min(left)} is no longer there: somebody has deleted it.", 404)


def _conclude(jobs: Jobs, searches: Sequence[dict[str, Any]], what: WhatToSubmit, json: bool) -> int:
    """The table, the summary and the exit code, as a batch on this machine has them."""
    from ..batch import print_summary, tell_outcomes

    results = [_result(job, search, what.folder) for job, search in zip(jobs.jobs, searches, strict=True)]
    tell_outcomes(results)
    rows = [result.as_row() | {"search": search["id"]} for result, search in zip(results, searches, strict=True)]
    write_summary(what.folder, rows)
    code = min((code for each in searches if (code := exit_code(each))), default=0)
    print_summary(what.folder / SUMMARY, code, {"jobs": rows}, json)
    return code


def _result(job: Job, search: dict[str, Any], folder: Path) -> JobResult:
    result = JobResult(job, job.options(folder, "cpu", False), _STATES.get(search["state"], "failed"))
    result.why, result.device_s = search["message"], None
    if search["state"] == "SUCCEEDED":
        result.state, result.plan = "interrupted" if result.why else "done", load_plan(result.options.output)
    return result
