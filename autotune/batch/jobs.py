"""What a batch is made of: jobs, read from a YAML file."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..errors import UserError
from ..files import read_text
from ..plain_yaml import explain, read_yaml
from ..search_spaces import load_space
from ..searches.options import PathOption, SearchedJob, SearchOptions
from ..task_file import refuse_script, task_file
from ..units import slug
from ..workers.devices import split_device

FOLDER = Path("plans")
"""Default folder of a batch's files."""
SUMMARY = "summary.yaml"


class Job(SearchedJob):
    """One search of a batch. Fields that are not given have the defaults of ``autotune search``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    """Names the plan's file, the study and the rows of the table."""
    priority: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Factor on a trial's expected gain when jobs compete for a device; above 0."""
    output: PathOption | None = None
    """Where the plan goes; ``<folder>/<name>.yaml`` otherwise."""

    def options(self, folder: Path, device: str, resume: bool) -> SearchOptions:
        """Of its search.

        Args:
            folder: where the batch's files go.
            device: where the job names none.
            resume: go on with its study.

        Raises:
            UserError: the command runs no script.
        """
        from ..script.command import script_name

        return SearchOptions(
            task=script_name(self.command) if self.command else self.task or "",
            command=self.command,
            name=self.name,
            output=self.plan(folder),
            device=split_device(self.device or device)[0],
            storage=f"sqlite:///{(folder / 'studies' / self.name).as_posix()}.db",
            resume=resume,
            **self.asked(),
        )

    def plan(self, folder: Path) -> Path:
        """Path of its plan."""
        return self.output or folder / f"{self.name}.yaml"

    @property
    def lane(self) -> tuple[object, ...]:
        """Name of its lane. Jobs of one lane run in turn, so that each begins with what the earlier ones measured."""
        source = self.command or str(task_file(self.task or "").resolve())
        return source, self.task, self.device

    @property
    def rank(self) -> tuple[float, float]:
        """Order within a lane: the highest priority, then the largest budget, whose measurements tell the most."""
        budget = math.inf if self.budget is None or isinstance(self.budget, float) else self.budget
        return -self.priority, -budget


class Jobs(BaseModel):
    """A batch."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True, title="autotune jobs"
    )

    schema_: Literal["autotune/jobs@1"] = Field(default="autotune/jobs@1", alias="schema")
    """The format's name and version."""
    jobs: Annotated[tuple[Job, ...], Field(min_length=1)]
    """In any order."""

    @field_validator("jobs", mode="before")
    @classmethod
    def _each_has_one_device(cls, rows: Any) -> Any:
        """A job for each device of those that list several, after all others: a fault's number is that of its row."""
        if not isinstance(rows, list):
            return rows
        found = [_on_each(row) for row in rows]
        return [*(jobs[0] for jobs in found), *(job for jobs in found for job in jobs[1:])]

    def lanes(self) -> list[list[Job]]:
        """Jobs of one task each, in the order that they run in; those with the highest priority first."""
        found: dict[tuple[object, ...], list[Job]] = {}
        for job in sorted(self.jobs, key=lambda job: job.rank):
            found.setdefault(job.lane, []).append(job)
        return list(found.values())


def _on_each(row: Any) -> list[Any]:
    """``gpt`` on ``cuda:A100`` is called ``gpt-cuda-a100``."""
    devices = row.get("device") if isinstance(row, dict) else None
    if not isinstance(devices, list) or not devices or not all(isinstance(one, str) for one in devices):
        return [row]
    return [{**row, "name": f"{row.get('name')}-{slug(one)}", "device": one} for one in devices]


def load_jobs(path: Path, folder: Path = FOLDER) -> Jobs:
    """Read a batch, and check that the files which its jobs name exist.

    Args:
        path: of the file.
        folder: where the batch's files go.

    Raises:
        UserError: no such file, not YAML, an unknown key or value, two jobs of one name, an output that is another's or
            a file of the user's, a task file or a space that is none; every problem on a line of its own.
    """
    try:
        text = read_text(path, "list of jobs", UserError)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. `autotune batch --help` shows what one looks like.") from None
    try:
        found = Jobs.model_validate(read_yaml(text, str(path), UserError))
    except ValidationError as error:
        raise UserError(explain(error, str(path), Jobs)) from None
    if problems := [*_problems(found.jobs), *_taken(found.jobs, path, folder)]:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return found


def _problems(jobs: tuple[Job, ...]) -> Iterator[str]:
    for name, number in Counter(job.name for job in jobs).items():
        if number > 1:
            yield f"jobs: {number} are called {name}. Give each a name of its own: plans are named by it."
    for place, job in enumerate(jobs):
        try:
            load_space(job.space)
            if job.task is not None:
                check_task(job.task)
            else:
                job.options(Path(), "cpu", False)
        except UserError as error:
            yield f"jobs.{place} ({job.name}): {error}"


def _taken(jobs: tuple[Job, ...], path: Path, folder: Path) -> Iterator[str]:
    """Outputs that are another job's, or a file that the batch reads or writes itself."""
    files = {os.path.realpath(path): "the list of jobs", os.path.realpath(folder / SUMMARY): "the batch's summary"}
    tasks = (task_file(job.task) for job in jobs if job.task is not None)
    files |= {os.path.realpath(task): "a task" for task in tasks if task.is_file()}
    writers: dict[str, set[str]] = {}
    for job in jobs:
        plan = job.plan(folder)
        if (what := files.get(os.path.realpath(plan))) is not None:
            yield f"jobs: {job.name} writes {plan}, which is {what}. Give it another output."
        writers.setdefault(os.path.realpath(plan), set()).add(job.name)
    for names in writers.values():
        if len(names) > 1:
            yield f"jobs: {', '.join(sorted(names)[:5])} write one file. Give each an output of its own."


def check_task(task: str) -> None:
    """Look for a job's task file, without running it.

    Raises:
        UserError: no such file, or it defines nothing of a task.
    """
    if not task_file(task).is_file():
        raise UserError(
            f"{task_file(task)}: no such file. Paths are taken from the folder that the batch is started in."
        )
    refuse_script(task)
