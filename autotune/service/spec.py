"""What is submitted: one search, in the words of ``autotune search``."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from ..searches.options import NOT_SUBMITTED, SearchedJob, option_name
from ..units import printable


def _one_line(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("printable text on one line was expected")
    return text


def inside(text: str) -> str:
    """A path that stays within the folder that it is relative to, and is no option."""
    path = PurePosixPath(_one_line(text))
    if path.is_absolute() or ".." in path.parts or text.startswith("-") or "\\" in text:
        raise ValueError(f"a path within the job's folder was expected, such as model.py, but got {text!r}")
    return text


_LONGEST = 200
"""Characters of a name or a path."""
MOST_TRIALS = 10_000


class SearchSpec(SearchedJob):
    """A search as it is submitted: the job in the words of ``autotune search``, where its files are, and how urgent it
    is."""

    archive: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of an archive that was put before: the job's folder."""
    folder: Annotated[str, Field(max_length=1000), AfterValidator(_one_line)] | None = None
    """In place of ``archive``: an absolute path on storage that the server shares; not with ``command``."""
    name: Annotated[str, Field(max_length=_LONGEST), AfterValidator(_one_line)] | None = None
    """Shown in lists; None is the task's name."""
    priority: int = Field(default=50, ge=0, le=100)
    """Higher runs first."""

    @field_validator("task", "space", "device")
    @classmethod
    def _is_short(cls, text: str | None) -> str | None:
        if text is not None and len(text) > _LONGEST:
            raise ValueError(f"at most {_LONGEST} characters were expected, but got {len(text)}")
        return text

    @field_validator("task", "space")
    @classmethod
    def _liesinside(cls, text: str | None) -> str | None:
        return None if text is None else inside(text)

    @field_validator("command")
    @classmethod
    def _is_a_line(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if command is not None and (len(command) > 200 or any("\0" in word or len(word) > 4096 for word in command)):
            raise ValueError("at most 200 arguments of at most 4096 characters, without null bytes, were expected")
        return command

    @field_validator("trials")
    @classmethod
    def _are_not_too_many(cls, trials: int) -> int:
        if trials > MOST_TRIALS:
            raise ValueError(f"at most {MOST_TRIALS} were expected")
        return trials

    @model_validator(mode="after")
    def _asks_for_a_plan_alone(self) -> Self:
        if given := self.given(NOT_SUBMITTED):
            raise ValueError(
                f"a service gives back a plan, and no weights: leave out {', '.join(given)}, or use `autotune search`"
            )
        return self

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


def arguments(job: SearchSpec, folder: Path | None) -> list[str]:
    """The job as arguments of ``autotune search``.

    Args:
        job: the job.
        folder: where its files are; None is the current folder.
    """
    said = job.asked()
    if job.device is not None:
        said["device"] = job.device
    place = folder or Path()
    if folder is not None and (folder / job.space).is_file():
        said["space"] = str(folder / job.space)
    line = []
    for name, value in said.items():
        is_switch = isinstance(value, bool)
        line.append(option_name(name if value else f"no_{name}") if is_switch else f"{option_name(name)}={value}")
    if job.command is not None:
        return [*line, "--", *job.command]
    return [*line, str(place / str(job.task))]
