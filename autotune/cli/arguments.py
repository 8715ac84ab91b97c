"""The command line's arguments and options, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..search.options import Drop
from .reading import (
    read_budget,
    read_budget_or_share,
    read_device_of_type,
    read_drop,
    read_duration,
    read_factor,
    read_margin,
)

TaskPath = Annotated[str, typer.Argument(metavar="MODEL.PY[:NAME]", help="The task file; `autotune init` writes one.")]
Job = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL.PY[:NAME] | -- COMMAND...",
        help="The task file; `autotune init` writes one. Or, behind --, what starts a training script.",
    ),
]
VerifiedJob = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL.PY[:NAME] | -- COMMAND...",
        help="The task file. Or, behind --, what starts the training script.",
        show_default="the task that the plan names, beside it",
    ),
]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.YAML", help="A plan that `autotune search` wrote.")]
JobsPath = Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs.")]
SharedStudies = Annotated[
    list[str], typer.Argument(metavar="STUDY[=RANKS]...", help="Path or URL of a search's study, for each type.")
]
BundleFolder = Annotated[Path, typer.Option("--output", "-o", help="Folder of the plans and of bundle.yaml.")]
PlansFolder = Annotated[Path, typer.Option("--output", "-o", help="Folder of the plans, the studies and the summary.")]
JobsAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Join this Ray cluster, shipping the folder of JOBS.YAML to it; the tasks lie in it.",
        show_default="a cluster of its own on this machine",
    ),
]
JobsServer = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="Submit the jobs to this service.", show_default="run them here"),
]
WaitForJobs = Annotated[
    bool, typer.Option("--wait", help="With --server: show what happens until all have ended, and fetch the plans.")
]
ResultsStorage = Annotated[
    str | None,
    typer.Option(metavar="URL", help="SQL database of what was measured.", show_default="SQLite: .autotune/results.db"),
]
ResumeBatch = Annotated[
    bool, typer.Option("--resume", help="Leave out what is done, and go on with the studies of the rest.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where the plan goes.")]
SearchOutput = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Where the plan goes, or the bundle.", show_default="plan.yaml; bundle with --devices"
    ),
]
StudyPath = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study's file or URL, as `autotune search --storage` has it.")
]
StudyName = Annotated[
    str | None, typer.Option("--study", metavar="NAME", help="Name of the study in it.", show_default="the newest")
]
ReportOutput = Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")]
Budget = Annotated[
    float | None,
    typer.Option(
        parser=read_budget_or_share,
        metavar="SIZE|PERCENT",
        help="Memory that the device may charge the job: 8GiB or 8G is 2**33 bytes, 8GB is 8 * 10**9; or 90% of what "
        "the job takes as it stands.",
        show_default="no limit: speed alone",
    ),
]
EstimatedBudget = Annotated[
    int | None,
    typer.Option(
        parser=read_budget,
        metavar="SIZE",
        help="Memory that the device may charge the job: 8GiB or 8G is 2**33 bytes, 8GB is 8 * 10**9.",
        show_default="all of the device's",
    ),
]
Trials = Annotated[
    int, typer.Option(min=1, help="Most configurations to measure, the reference included; repeated runs do not count.")
]
MaxTime = Annotated[
    float | None,
    typer.Option(
        parser=read_duration,
        metavar="TIME",
        help="Longest time for the whole search, repeated runs of the best included: 90s, 20m, 1.5h.",
        show_default="no limit",
    ),
]
TrialTime = Annotated[
    float,
    typer.Option(
        parser=read_duration,
        metavar="TIME",
        help="Longest time for one trial's timed steps; it ends once its speed is known to 2 %: 2s, 1m.",
        show_default="60s",
    ),
]
Space = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="Techniques to try: a preset (default, exact, lossy) or a YAML file.")
]
EffectiveBatch = Annotated[
    int | None,
    typer.Option(min=1, help="Samples that one optimizer step sees, held fixed.", show_default="the task's batch_size"),
]
Flags = Annotated[
    Literal["auto", "off"],
    typer.Option(
        help="For a script's command without placeholders: auto searches the batch through its own known "
        "flags, if they state the batch that it is seen to train with; off leaves the batch alone."
    ),
]
ScratchFolder = Annotated[
    Literal["auto", "copy", "empty", "off"],
    typer.Option(
        help="Run each trial of a script in a folder of its own, removed after it: a copy of the current one, or an "
        "empty one. auto: a copy of a folder of up to 256 MiB and 5,000 files."
    ),
]
AllowSplit = Annotated[bool, typer.Option("--allow-split", help="Split batches even where that changes the gradient.")]
MaxQualityDrop = Annotated[
    Drop | None,
    typer.Option(
        "--max-quality-drop",
        parser=read_drop,
        metavar="DROP",
        help="Try techniques that change the model, and allow the task's evaluate to fall by so much: 1%, or 0.5.",
        show_default="no such technique is tried",
    ),
]
RecoverySteps = Annotated[
    int,
    typer.Option(min=1, help="With --max-quality-drop: optimizer steps of training before quality is judged."),
]
RecoveryLr = Annotated[
    float,
    typer.Option(
        callback=read_factor,
        help="With --max-quality-drop: factor on the learning rates in that training.",
    ),
]
Distill = Annotated[
    bool,
    typer.Option(
        "--distill", help="With --max-quality-drop: candidates also learn from the untouched model's outputs."
    ),
]
KeepWeights = Annotated[
    bool,
    typer.Option(
        "--keep-weights", help="With --max-quality-drop: write the winner's recovered weights beside the plan."
    ),
]
Margin = Annotated[
    float, typer.Option(callback=read_margin, help="The measured peak times 1 + margin must be within the budget.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seeds the task and the sampler.")]
Sampler = Annotated[
    Literal["gain", "tpe", "gp", "random"],
    typer.Option(help="Chooses what to try: gain predicts memory and work, and stops by itself; others are Optuna's."),
]
ExecutorName = Annotated[Literal["local", "ray"], typer.Option(help="What runs the trials, each in its own process.")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Join this Ray cluster, shipping the task's folder to it.",
        show_default="a cluster of its own on this machine",
    ),
]
Storage = Annotated[
    str | None, typer.Option(metavar="URL", help="Optuna storage of the study.", show_default="SQLite under .autotune/")
]
Ablate = Annotated[
    bool,
    typer.Option(
        "--ablate",
        help="Once the plan is written, measure it again without each of its choices in turn, for `autotune report`.",
    ),
]
RequireProof = Annotated[
    bool,
    typer.Option(
        "--require-proof",
        help="End with 3 where the plan is not proven to be faster than the job as it stands; it is written all the "
        "same.",
    ),
]
ProgressFile = Annotated[
    Path | None,
    typer.Option(
        "--progress", metavar="FILE", help="Append one JSON line to it for each thing that happens, for programs."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with this task's newest study.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the space, its size and an estimate of the time; measure nothing.")
]
Device = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(help="Device type that trials run on.", show_default="cuda where this machine has it, else cpu"),
]
DeviceOfType = Annotated[
    str | None,
    typer.Option(
        "--device",
        parser=read_device_of_type,
        metavar="cpu|cuda[:NAME]",
        help="Device type that trials run on; where there are unlike ones, a part of their name and memory: cuda:A100.",
        show_default="cuda where this machine has it, else cpu",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="all|cpu|cuda|TYPE[*RANKS][=BUDGET],...",
        help="Share one training out over unlike devices: a plan and a share for each type, such as "
        "cuda:A100*2=70GiB,cuda:T4*4=14GiB. RANKS is as many as there are, BUDGET is --budget's, if left out. -o is "
        "then a folder.",
        show_default="one type: --device",
    ),
]
DeviceMemory = Annotated[
    int | None,
    typer.Option(
        parser=read_budget,
        metavar="SIZE",
        help="Plan for a CUDA device of this memory, which need not be here.",
        show_default="none: plan for this machine",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 3 also when it is slower than the plan says.")]
StrictRun = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse where device, torch, threads or batch shapes are not those that the plan was found with.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Framework = Annotated[
    Literal["transformers", "accelerate", "lightning", "ray_train", "flags"] | None,
    typer.Option("--for", help="Print what to write in a job of this framework.", show_default="explain the plan"),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show on stderr what the task prints, and where a search's time went.")
]

Depth = Annotated[
    int | None,
    typer.Option(min=0, help="Levels of modules below the model.", show_default="as many as fit a screen"),
]
ProfiledPlan = Annotated[
    Path | None, typer.Option("--plan", metavar="PLAN.YAML", help="Profile with this plan in force.")
]
ProfiledBatch = Annotated[
    int | None,
    typer.Option("--batch", min=1, help="Samples in one forward pass.", show_default="the plan's or the task's"),
]
Alone = Annotated[bool, typer.Option("--alone", help="Do not repeat the step with each technique.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page that draws memory over one step by module.")
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace of two steps: for Perfetto, or HTA.")
]
