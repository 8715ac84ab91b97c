"""``autotune batch``: many jobs that share devices and what they measure."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..batch.jobs import FOLDER, SUMMARY, Job, Jobs, load_jobs
from ..batch.lane import Inspecting
from ..batch.result import JobResult
from ..batch.run import Batch, JobRun, job_run, prepare_batch
from ..errors import AutotuneError, Interrupted, UserError
from ..report.batch import Watch, explain_previews, outcome_table
from ..report.printing import console, listened_to, print_json, print_words, tell
from ..results import PreviewedJob
from ..searches.store.measurements import Results
from ..searches.store.storage import default_storage
from ..techniques import Facts
from ..units import format_percent
from ..words import count
from ..workers.devices import split_device
from .interrupts import interrupts
from .preview import preview_search
from .where import Where, default_device, trials

if TYPE_CHECKING:
    from ..workers import Executor, Outcome

Devices = Mapping[str, "Executor"]
_CODES = {"bug": 1, "failed": 2, "nothing fits": 3}
"""Exit codes by the state of a job; the first that any has."""


@dataclass(frozen=True)
class WhatToTune:
    """What the user asked for. Every field is a command-line argument of ``autotune batch``."""

    jobs: Path
    """``jobs.yaml``."""
    folder: Path = FOLDER
    """``--output``: of the plans, the studies and the summary."""
    storage: str | None = None
    """``--storage``: where measurements are kept; None is SQLite under ``.autotune/``."""
    resume: bool = False
    """``--resume``."""


def batch(what: WhatToTune, where: Where, dry_run: bool, json: bool) -> int:
    """Run a batch, or say what it would do.

    Returns:
        The exit code: 0 where every job has its plan, 130 after a Ctrl-C, else that of a job without one.
    """
    jobs = load_jobs(what.jobs, what.folder)
    results = Results(what.storage or default_storage("results"))
    device = default_device(where.address) if any(job.device is None for job in jobs.jobs) else "cpu"
    with executors_for(jobs, what.jobs, where, device) as executors:
        if dry_run:
            return preview(jobs, what, executors, results, json, device)
        found, stop = run_jobs(jobs, what, executors, results, device)
    code = tell_of(found, stop.is_set())
    print_summary(found.folder / SUMMARY, code, as_document(found), json)
    return code


def run_jobs(
    jobs: Jobs, what: WhatToTune, executors: Devices, results: Results, device: str = "cpu"
) -> tuple[Batch, threading.Event]:
    """Run jobs, watched, to their end or a Ctrl-C.

    Args:
        jobs: what is asked for.
        what: where their files go.
        executors: by the device that jobs ask for; the caller closes them.
        results: where measurements are kept.
        device: of jobs that name none.

    Returns:
        What came of them, and an event that a Ctrl-C has set.
    """
    stop, watch = threading.Event(), Watch(console(sys.stderr))
    found = prepare_batch(jobs, what.folder, executors, results, stop, what.resume, watch.observe, device)
    with watch.drawing(found), interrupts(stop, lambda: close_all(executors), watch.interrupted):
        found.run()
    return found, stop


def close_all(executors: Devices) -> None:
    """End every trial."""
    for executor in executors.values():
        executor.close()


@contextmanager
def executors_for(jobs: Jobs, path: Path, where: Where, default: str = "cpu") -> Iterator[Devices]:
    """An executor for each device that the jobs ask for, ``default`` where they name none; one where several mean the
    same. A cluster is shipped the folder of ``path``, the jobs' file."""
    with ExitStack() as stack:
        found: dict[str, Executor] = {}
        by_type: dict[tuple[str, str], Executor] = {}
        for wanted in sorted({job.device or default for job in jobs.jobs}):
            device, name = split_device(wanted)
            mine = (job for job in jobs.jobs if (job.device or default) == wanted)
            sizes = {size for job in mine for size in _gpus_of(job, default, where)}
            size = None if None in sizes else max((size for size in sizes if size), default=1)
            # it looks at no task: each job's was looked at
            shipping = replace(where, is_script=True, device_name=name, gpus_per_trial=size)
            executor = stack.enter_context(trials(shipping, str(path), device))
            found[wanted] = by_type.setdefault((device, executor.device_type), executor)
        yield found


def _gpus_of(job: Job, default: str, where: Where) -> Iterator[int | None]:
    """How many each of its trials has; nothing of a job that is going to fail."""
    with suppress(UserError):
        yield where.for_search(job.options(Path(), default, resume=False)).gpus_per_trial


def tell_of(found: Batch, was_stopped: bool) -> int:
    """Say on stderr what came of each job, and return the exit code."""
    with suppress(OSError):  # the plans are written, whoever listens
        devices = found.devices() if len(found.devices()) > 1 else []
        tell_outcomes(found.jobs, devices)
    code = min((_CODES[run.state] for run in found.jobs if run.state in _CODES), default=0)
    return Interrupted.exit_code if was_stopped else code


def tell_outcomes(runs: Sequence[JobResult], devices: Sequence[dict[str, Any]] = ()) -> None:
    """Print the table of what came of each job, what devices had to do, and why there is no plan."""
    print_words(sys.stderr, outcome_table(runs), 140)
    for device in devices:
        tell(f"{device['name']}: {count(device['runs'], 'run')}, busy {format_percent(device['busy'])} of the time")
    failed = [run for run in runs if run.state in _CODES]
    for why in dict.fromkeys(run.why for run in failed):
        tell(f"\n{', '.join(run.job.name for run in failed if run.why == why)}: {why}")


def print_summary(path: Path, code: int, document: Mapping[str, Any], json: bool) -> None:
    """Print where the summary is, or one document of it."""
    if json:
        print_json({"exit_code": code, "summary": str(path), **document})
    else:
        with listened_to(sys.stdout):
            print(path)


def as_document(found: Batch) -> dict[str, Any]:
    """Plain data."""
    return {"jobs": [run.as_row() for run in found.jobs], "devices": found.devices()}


def preview(jobs: Jobs, what: WhatToTune, executors: Devices, results: Results, json: bool, device: str) -> int:
    """Say what jobs would do, on ``device`` where they name none; the exit code."""
    tell("reading the tasks; no trial is run")
    found = preview_jobs(jobs, what, executors, results, device)
    if json:
        print_json({"jobs": [preview_as_json(one) for one in found]})
    else:
        print_words(sys.stdout, explain_previews(found), 140)
    return 0


def preview_jobs(
    jobs: Jobs, what: WhatToTune, executors: Devices, results: Results, device: str = "cpu"
) -> list[PreviewedJob]:
    """What jobs would do, in the order that they run in, on ``device`` where they name none; measures nothing."""
    found: list[PreviewedJob] = []
    for lane in jobs.lanes():
        before: PreviewedJob | None = None
        inspected: dict[str, Outcome] = {}
        for job in lane:
            run = job_run(job, what.folder, device, what.resume)
            before = _preview_job(run, Inspecting(executors[run.where], inspected), results, before)
            found.append(before)
    return found


def _preview_job(run: JobRun, executor: Executor, results: Results, before: PreviewedJob | None) -> PreviewedJob:
    """``before`` is the job that runs before it, and whose measurements it begins with."""
    num_known = 0

    def known(facts: Facts) -> int:
        nonlocal num_known
        from ..searches.reuse import code_of, key_of

        key = key_of(facts, run.options, code_of(run.options))
        likely = before.preview.num_likely if before is not None and before.preview is not None else 0
        num_known = max(len(results.known(key, results.series(key))), likely)
        return num_known

    why = "" if before is None else f"after {before.options.stem}"
    try:
        found = preview_search(run.options, executor, known)
    except AutotuneError as error:
        return PreviewedJob(run.options, None, why=str(error).split("\n")[0])
    return PreviewedJob(run.options, found, num_known, why)


def preview_as_json(one: PreviewedJob) -> dict[str, Any]:
    """Plain data."""
    row: dict[str, Any] = {"name": one.options.stem, "known": one.num_known, "why": one.why}
    if one.preview is not None:
        expected = one.preview.expected
        row |= {"configurations": one.preview.num_configurations, "likely_trials": one.preview.num_likely}
        row["estimate_s"] = {"low": expected.low_s, "high": expected.high_s, "most": expected.most_s}
    return row
