"""``autotune``: parse, call one function per command, and leave with the right exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from . import __version__
from .commands.arguments import (
    Ablate,
    Address,
    AllowSplit,
    Alone,
    Budget,
    BundleFolder,
    Depth,
    Device,
    DeviceMemory,
    Distill,
    DryRun,
    EffectiveBatch,
    EstimatedBudget,
    ExecutorName,
    Flags,
    Framework,
    Html,
    Job,
    JobsAddress,
    JobsPath,
    Json,
    KeepWeights,
    Margin,
    MaxQualityDrop,
    MaxTime,
    Output,
    PlanPath,
    PlansFolder,
    ProfiledBatch,
    ProfiledPlan,
    ProgressFile,
    RecoveryLr,
    RecoverySteps,
    ReportOutput,
    ResultsStorage,
    Resume,
    ResumeBatch,
    Sampler,
    ScratchFolder,
    Seed,
    SharedStudies,
    Space,
    Storage,
    Strict,
    StrictRun,
    StudyName,
    StudyPath,
    TaskPath,
    Trace,
    Trials,
    TrialTime,
    Verbose,
    VerifiedJob,
)
from .errors import AutotuneError
from .interrupts import interruptible
from .report.printing import GONE, discard, listened_to, print_json, tell
from .search.options import SearchOptions
from .service_commands import add_service_commands

__all__ = ["app", "main"]

app = typer.Typer(
    name="autotune",
    epilog="Exit codes: 0 done, 1 our bug, 2 your input, 3 nothing fits or a plan no longer holds, "
    "130 interrupted with the best so far saved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


_UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""click's, wherever the typer that is installed keeps it."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autotune {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find, prove and write the fastest configuration of a PyTorch training job inside a memory budget."""


@app.command(short_help="Search for the fastest plan within a memory budget.")
def search(  # the command's options, one line each: typer's form
    job: Job,
    output: Output = SearchOptions.output,
    budget: Budget = SearchOptions.budget_bytes,
    trials: Trials = SearchOptions.trials,
    max_time: MaxTime = SearchOptions.max_time_s,
    trial_time: TrialTime = SearchOptions.trial_time_s,
    space: Space = SearchOptions.space,
    effective_batch: EffectiveBatch = SearchOptions.effective_batch,
    flags: Flags = SearchOptions.flags,
    scratch: ScratchFolder = SearchOptions.scratch,
    allow_split: AllowSplit = SearchOptions.allow_split,
    max_quality_drop: MaxQualityDrop = SearchOptions.max_quality_drop,
    recovery_steps: RecoverySteps = SearchOptions.recovery_steps,
    recovery_lr: RecoveryLr = SearchOptions.recovery_lr,
    distill: Distill = SearchOptions.distill,
    keep_weights: KeepWeights = SearchOptions.keep_weights,
    margin: Margin = SearchOptions.margin,
    seed: Seed = SearchOptions.seed,
    sampler: Sampler = SearchOptions.sampler,
    executor: ExecutorName = "ray",
    address: Address = None,
    storage: Storage = SearchOptions.storage,
    resume: Resume = SearchOptions.resume,
    ablate: Ablate = SearchOptions.ablate,
    progress: ProgressFile = SearchOptions.progress,
    dry_run: DryRun = False,
    device: Device = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Find the fastest configuration of a job that stays within the budget, and write it as a plan.

    The job is a task file, or a training script of your own, unedited: after -- comes the command that starts it, with
    {batch.micro=32} and {batch.accumulate=1} where its own flags take them.

    Ctrl-C once finishes the running trials and writes the best so far; twice stops at once.
    """
    from .commands.where import Where, default_device

    is_script = len(job) > 1
    if is_script:
        from .script.command import script_name
    options = SearchOptions(
        task=script_name(job) if is_script else job[0],
        command=tuple(job) if is_script else None,
        output=output,
        budget_bytes=budget if isinstance(budget, int) else None,
        budget_share=budget if isinstance(budget, float) else None,
        trials=trials,
        max_time_s=max_time,
        trial_time_s=trial_time,
        space=space,
        effective_batch=effective_batch,
        flags=flags,
        scratch=scratch,
        allow_split=allow_split,
        max_quality_drop=max_quality_drop,
        recovery_steps=recovery_steps,
        recovery_lr=recovery_lr,
        distill=distill,
        keep_weights=keep_weights,
        margin=margin,
        seed=seed,
        sampler=sampler,
        storage=storage,
        resume=resume,
        ablate=ablate,
        progress=progress,
        device=device or default_device(),
    )
    if dry_run:
        from .commands.preview import preview as command
    else:
        from .commands.search import search as command
    with _one_document(json):
        where = Where(executor, address, is_script, verbose)
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
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Search for the plans of many jobs that share devices, and what they measure.

    JOBS.YAML lists them: {jobs: [{name: a, task: model.py, budget: 8GiB}, {name: b, task: model.py, budget: 4GiB}]}.
    Each also takes command (in place of task), device, space, priority, trials, max_time, trial_time, effective_batch,
    sampler, seed and output (of its plan).

    Each free device goes to the trial, over all jobs, that is expected to gain the most for each second, times the
    job's priority. Jobs of one task begin with what the others measured, today or earlier, once one configuration was
    measured again and agrees. A job that fails stops no other. Exits with 0 when every job has its plan.

    Ctrl-C once finishes the running trials and writes the best so far of each job; twice stops at once.
    """
    from .commands.batch import WhatToTune
    from .commands.batch import batch as command
    from .commands.where import Where

    with _one_document(json):
        where = Where(executor, address, verbose=verbose)
        raise typer.Exit(command(WhatToTune(jobs, output, storage, resume), where, dry_run, json))


@app.command(short_help="Share one training out over unlike devices.")
def share(
    studies: SharedStudies,
    output: BundleFolder = Path("bundle"),
    effective_batch: EffectiveBatch = SearchOptions.effective_batch,
    allow_split: AllowSplit = SearchOptions.allow_split,
    json: Json = False,
) -> None:
    """Give each type of device a plan and a share of each optimizer step, so that all finish together.

    STUDY is what a search of the task on that type of device has kept, one for each; STUDY=2 is two ranks of it. What
    was measured there decides; nothing is measured here.
    """
    from .commands.share import WhatToShare
    from .commands.share import share as command

    with _one_document(json):
        command(WhatToShare(studies, output, effective_batch, allow_split), json)


@app.command(short_help="Explain a plan in words.")
def show(plan: PlanPath, framework: Framework = None, json: Json = False) -> None:
    """Explain a plan in words: what each row does, what it was measured at, and how to apply it."""
    from .commands.show import show as command

    with _one_document(json):
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
    from .commands.report import report as command

    with _one_document(json):
        command(study, name, output, json)


@app.command(short_help="Measure a plan again.")
def verify(
    plan: PlanPath,
    job: VerifiedJob = None,
    strict: Strict = False,
    scratch: ScratchFolder = SearchOptions.scratch,
    trial_time: TrialTime = SearchOptions.trial_time_s,
    executor: ExecutorName = "ray",
    address: Address = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Measure a plan again. Exits with 0 when it holds, 3 when it is over its budget, 2 for another model.

    The plan of a script is verified by the command that starts it, behind --.
    """
    from .commands.verify import verify as command
    from .commands.where import Where

    with _one_document(json):
        found = command(plan, job, Where(executor, address, len(job or ()) > 1, verbose), trial_time, json, scratch)
    if not found.holds or (strict and found.slower):
        raise typer.Exit(3)


@app.command(short_help="Show where a training step's memory and time go, module by module.")
def profile(
    task: TaskPath,
    plan: ProfiledPlan = None,
    batch: ProfiledBatch = None,
    depth: Depth = None,
    alone: Alone = False,
    html: Html = None,
    trace: Trace = None,
    seed: Seed = SearchOptions.seed,
    device: Device = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Show, module by module, what one optimizer step keeps, what fills its peak, and what would change that.

    One step of MODEL.PY is traced in a process of its own, then once more with each technique that may change it.
    Ctrl-C leaves out those techniques that have not been measured yet.
    """
    from .commands.profile import ProfileForm
    from .commands.profile import profile as command
    from .commands.where import default_device
    from .results import WhatToProfile

    what = WhatToProfile(task, device or default_device(), batch=batch, alone=alone, trace=trace, seed=seed)
    with _one_document(json):
        raise typer.Exit(command(what, plan, ProfileForm(depth, html, json), verbose))


@app.command(short_help="Tell without a device which micro-batch fits, and what fills the memory.")
def estimate(
    task: TaskPath,
    budget: EstimatedBudget = None,
    device_memory: DeviceMemory = None,
    space: Space = SearchOptions.space,
    effective_batch: EffectiveBatch = SearchOptions.effective_batch,
    device: Device = None,
    storage: Storage = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Tell, for combinations of techniques, the largest micro-batch of MODEL.PY that fits, without running it.

    A training step is traced over fake tensors (shapes without data), in a process of its own for each combination. Its
    allocations are extended to any batch. A model that cannot be traced runs a few small steps instead. Where a search
    has measured this task, its trials calibrate the estimate. Exits with 3 when nothing fits.
    """
    from .commands.estimate import estimate as command
    from .commands.where import default_device
    from .results import WhatToEstimate

    target = device or ("cuda" if device_memory is not None else default_device())
    what = WhatToEstimate(task, budget, target, device_memory, space, effective_batch, storage)
    with _one_document(json):
        command(what, json, verbose)


@app.command(
    short_help="Start a job as its plan needs it.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def run(
    plan: PlanPath,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The job, such as python train.py.")],
    strict: StrictRun = False,
) -> None:
    """Start a job with a plan in force: a script that Python runs needs no change; one line says what is in force.

    {batch.micro} and {batch.accumulate} in the command stand for the plan's. What a script makes impossible ends it
    with 2 and the reason. A job that applies its plan itself finds it by AUTOTUNE_PLAN, and is left to it.
    """
    from .commands.run import run as start

    start(plan, command[1:] if command[0] == "--" else command, strict)


@app.command(short_help="Write a commented task file that runs.")
def init(
    path: Annotated[Path, typer.Argument(metavar="MODEL.PY", help="The file to write; it must not exist.")] = Path(
        "model.py"
    ),
) -> None:
    """Write a commented task file that runs as it stands, to be filled with your own model and data."""
    from .commands.starter import write_starter

    write_starter(path)
    print(path)
    print(f"Next: put your model in, then `autotune search {path} --budget 2GiB`.", file=sys.stderr)


@app.command(short_help="Tell what this machine offers and lacks.")
def doctor(json: Json = False) -> None:
    """Tell what this machine offers: devices, memory, versions, allocators; what is missing and how to get it."""
    from .commands.doctor import doctor as command

    command(json)


@contextmanager
def _one_document(json: bool) -> Iterator[None]:
    """With ``--json``, stdout has one document also when it goes wrong."""
    try:
        yield
    except AutotuneError as error:
        if json:
            print_json({"exit_code": error.exit_code, "error": str(error), "kind": type(error).__name__})
        raise


add_service_commands(app, _one_document)


def main() -> None:
    """The ``autotune`` command."""
    _have_standard_streams()
    try:
        _run()
    finally:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            try:
                stream.flush()
            except OSError:  # what is left of it must not decide the exit code
                discard(number)


def _run() -> NoReturn:
    try:
        with interruptible():
            code = app(standalone_mode=False)
        with listened_to(sys.stdout):
            pass
        sys.exit(code)  # a command's own typer.Exit comes back as its code
    except _UsageError as error:
        with suppress(OSError):
            error.show()
        if "--json" in sys.argv:
            print_json({"exit_code": 2, "error": error.format_message()})
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        tell("Interrupted.")
        sys.exit(130)
    except AutotuneError as error:
        tell(str(error))
        sys.exit(error.exit_code)
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        discard(1)  # the reader has had enough, which typer takes for an error
        sys.exit(0)
    except OSError as error:
        _end_for(error)
    except Exception:  # noqa: BLE001 - the outermost frame
        _report_bug()


def _end_for(error: OSError) -> NoReturn:
    """What the system refused: a stream that has gone is no error, and some paths no system has."""
    if error.errno == errno.ENAMETOOLONG:
        tell(f"{str(error.filename)[:80]}…: {error.strerror}. Choose a shorter path.")
        sys.exit(2)
    if error.errno not in (*GONE, errno.ENOSPC):
        _report_bug()
    discard(1)
    if error.errno in GONE:
        sys.exit(0)
    tell(f"What was to be printed could not be written: {error.strerror}.")
    sys.exit(2)


def _report_bug() -> NoReturn:
    tell(f"{traceback.format_exc()}This is a bug in autotune, not in your input. Please report it with the text above.")
    sys.exit(1)


def _have_standard_streams() -> None:
    """A daemon's may be closed, and files opened later would take their numbers; any text can be printed to them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the process's life
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
