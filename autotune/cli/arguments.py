"""The command line's arguments and options that are no field of a search's, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..searches.options import read_bytes

SEQUENCE = 512
"""Tokens in a sample, where nobody says."""


def _read_bytes(text: str) -> int:
    try:
        return read_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


TaskPath = Annotated[str, typer.Argument(metavar="MODEL.PY[:NAME]", help="The task file; `autotune init` writes one.")]
EstimatedTask = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL.PY[:NAME]", help="The task file; `autotune init` writes one.", show_default="the model of --hf"
    ),
]
HfConfig = Annotated[
    Path | None,
    typer.Option(
        "--hf",
        metavar="CONFIG.JSON|FOLDER",
        help="In place of a task file: training the model of this transformers configuration with AdamW. No weights "
        "are downloaded.",
    ),
]
Sequence = Annotated[int | None, typer.Option(min=1, help="With --hf: tokens in a sample.", show_default=str(SEQUENCE))]
Lora = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="[RANK]",
        help="With --hf: train adapters of this rank (8, if left out) of attention's queries and values, the rest "
        "being frozen.",
    ),
]
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
        show_default="the task that the plan names, next to it",
    ),
]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.YAML", help="A plan that `autotune search` wrote.")]
ExportedTask = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL.PY[:NAME]", help="The task file.", show_default="the task that the plan names, next to it"
    ),
]
ExportedTo = Annotated[
    Literal["onnx", "pt2"],
    typer.Option(help="The file's format: onnx, which onnxruntime runs, or pt2, which torch.export.load reads."),
]
ExportOutput = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Where the file goes.", show_default="the plan's name: plan.onnx"),
]
JobsPath = Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs.")]
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
StudyPath = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study's file or URL, as `autotune search --storage` has it.")
]
StudyName = Annotated[
    str | None, typer.Option("--study", metavar="NAME", help="Name of the study in it.", show_default="the newest")
]
ReportOutput = Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")]
EstimatedBudget = Annotated[
    int | None,
    typer.Option(
        parser=_read_bytes,
        metavar="SIZE",
        help="Memory that the device may charge the job: 8GiB or 8G is 2**33 bytes, 8GB is 8 * 10**9.",
        show_default="all of the device's",
    ),
]
ExecutorName = Annotated[
    Literal["local", "ray"],
    typer.Option(rich_help_panel="Where", help="What runs the trials, each in its own process."),
]
Address = Annotated[
    str | None,
    typer.Option(
        rich_help_panel="Where",
        metavar="HOST:PORT",
        help="Join this Ray cluster, shipping the task's folder to it.",
        show_default="a cluster of its own on this machine",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        rich_help_panel="Output",
        help="Print the space, its size and an estimate of the time; measure nothing.",
    ),
]
Device = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(help="Device type that trials run on.", show_default="cuda where this machine has it, else cpu"),
]
Devices = Annotated[
    str | None,
    typer.Option(
        rich_help_panel="Where",
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
        parser=_read_bytes,
        metavar="SIZE",
        help="Plan for a CUDA device of this memory, which need not be here.",
        show_default="none: plan for this machine",
    ),
]
Cards = Annotated[
    str | None,
    typer.Option(
        "--card",
        metavar="[NAME,...|all]",
        help="Plan for a card that need not be here, by its name: h100, rtx3090. Of several, or of all that are known, "
        "a row each.",
        show_default="none: plan for this machine",
    ),
]
Card = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Plan for a card that need not be here, by its name: h100, rtx3090.",
        show_default="none: plan for this machine",
    ),
]
Techniques = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Choose from these, as autotune.fit(techniques=…) does: layers, checkpointing, optimizer_state, offload.",
        show_default="checkpointing, layers, optimizer_step; on a CPU the allocator mmap",
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
Enforce = Annotated[
    bool,
    typer.Option(
        "--enforce",
        help="On CUDA, refuse the job memory beyond the plan's budget to its end, as a device of that size would. "
        "Without it a job that needs more than its trials goes on, and one line says so.",
    ),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel="Output", help="Print one JSON document on stdout.")]
Framework = Annotated[
    Literal["transformers", "accelerate", "lightning", "ray_train", "flags"] | None,
    typer.Option("--for", help="Print what to write in a job of this framework.", show_default="explain the plan"),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        rich_help_panel="Output",
        help="Show on stderr what the task prints, and where a search's time went.",
    ),
]

Depth = Annotated[
    int | None, typer.Option(min=0, help="Levels of modules below the model.", show_default="as many as fit a screen")
]
ProfiledPlan = Annotated[
    Path | None, typer.Option("--plan", metavar="PLAN.YAML", help="Profile with this plan applied.")
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
