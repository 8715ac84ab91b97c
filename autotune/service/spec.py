"""What is submitted: one search, in the words of ``autotune search``."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..units import parse_bytes, parse_duration, parse_percent, printable
from ..workers.devices import split_device


def _one_line(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("printable text on one line was expected")
    return text


def _argument(text: str) -> str:
    if "\0" in text:
        raise ValueError("no argument of a command has a null byte")
    return text


def _device(text: str) -> str:
    split_device(text)
    return _one_line(text)


def _inside(text: str) -> str:
    """A path that stays within the folder that it is relative to, and is no option."""
    path = PurePosixPath(_one_line(text))
    if path.is_absolute() or ".." in path.parts or text.startswith("-") or "\\" in text:
        raise ValueError(f"a path within the job's folder was expected, such as model.py, but got {text!r}")
    return text


def _budget(text: str) -> str:
    parse_percent(text) if text.strip().endswith("%") else parse_bytes(text)
    return _one_line(text)


def _duration(text: str) -> str:
    parse_duration(text)
    return _one_line(text)


def _drop(text: str) -> str:
    if not 0 <= float(text.removesuffix("%")) < float("inf"):
        raise ValueError(f"how far the quality may fall was expected, such as 1% or 0.5, but got {text!r}")
    return text


_Short = Annotated[str, Field(max_length=200)]
Inside = Annotated[_Short, AfterValidator(_inside)]
Duration = Annotated[_Short, AfterValidator(_duration)]


class Job(BaseModel):
    """How to search: each field is the option of ``autotune search`` of that name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    task: Inside | None = None
    """``model.py`` or ``model.py:name``, within the archive or ``folder``."""
    command: (
        Annotated[
            tuple[Annotated[str, Field(max_length=4096), AfterValidator(_argument)], ...],
            Field(min_length=1, max_length=200),
        ]
        | None
    ) = None
    """In place of ``task``: what starts a training script in the archive, with its placeholders."""
    budget: Annotated[_Short, AfterValidator(_budget)] | None = None
    """``8GiB``, or ``90%`` of what the job takes as it stands; None searches for speed alone."""
    trials: int = Field(default=24, ge=1, le=10_000)
    """Most configurations to measure."""
    max_time: Duration | None = None
    """Longest time for the whole search: ``20m``."""
    trial_time: Duration = "60s"
    """Longest time for one trial's timed steps."""
    space: Inside = "default"
    """A preset's name, or a YAML file within the archive."""
    effective_batch: int | None = Field(default=None, ge=1, le=2**40)
    """Samples that one optimizer step sees."""
    flags: Literal["auto", "off"] = "auto"
    """Whether a command's own flags, where they are known, take the batch."""
    scratch: Literal["auto", "copy", "empty", "off"] = "auto"
    """Trials of a command run in folders of their own: copies of the job's (``auto``: of a small one), or empty."""
    allow_split: bool = False
    """Split batches even where that changes the gradient."""
    max_quality_drop: Annotated[_Short, AfterValidator(_drop)] | None = None
    """How far ``evaluate`` may fall; None tries nothing that changes the model."""
    recovery_steps: int = Field(default=100, ge=1, le=2**31)
    """Optimizer steps before quality is judged."""
    recovery_lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Times the learning rates meanwhile."""
    margin: float = Field(default=0.03, ge=0, lt=1)
    """The measured peak times 1 + margin must be within the budget."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the task and the sampler."""
    sampler: Literal["gain", "tpe", "gp", "random"] = "gain"
    """Chooses what to try."""
    ablate: bool = False
    """Once there is a plan, measure it without each of its choices in turn."""
    device: Annotated[_Short, AfterValidator(_device)] | None = None
    """``cpu``, ``cuda``, or one type of them by a part of its name and memory: ``cuda:A100``. None is cuda where the
    machine has it."""

    @model_validator(mode="after")
    def _check_one_job(self) -> Self:
        if (self.task is None) == (self.command is None):
            raise ValueError("either task or command was expected")
        return self


class SearchSpec(Job):
    """A search as it is submitted: the job, where its files are, and how urgent it is."""

    archive: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of an archive that was put before: the job's folder."""
    folder: Annotated[str, Field(max_length=1000), AfterValidator(_one_line)] | None = None
    """In place of ``archive``: an absolute path on storage that the server shares; not with ``command``."""
    name: Annotated[_Short, AfterValidator(_one_line)] | None = None
    """Shown in lists; None is the task's name."""
    priority: int = Field(default=50, ge=0, le=100)
    """Higher runs first."""

    @model_validator(mode="after")
    def _check_one_place(self) -> Self:
        if (self.archive is None) == (self.folder is None):
            raise ValueError("either archive or folder was expected")
        if self.folder is not None and (not Path(self.folder).is_absolute() or self.command is not None):
            raise ValueError("folder: an absolute path was expected, and a task in it; a command needs an archive")
        return self

    @property
    def title(self) -> str:
        """The name, or what stands for it."""
        return self.name or self.task or printable(" ".join(self.command or ()))[:200]


def arguments(job: Job, folder: Path | None) -> list[str]:
    """The job as arguments of ``autotune search``.

    Args:
        job: the job.
        folder: where its files are; None is the current folder.
    """
    said: dict[str, Any] = job.model_dump(exclude_defaults=True, include=set(Job.model_fields) - {"task", "command"})
    place = folder or Path()
    if folder is not None and (folder / job.space).is_file():
        said["space"] = str(folder / job.space)
    line = []
    for name, value in said.items():
        option = f"--{name.replace('_', '-')}"
        line += [option] if value is True else [f"{option}={value}"]
    if job.command is not None:
        return [*line, "--", *job.command]
    return [*line, str(place / str(job.task))]
