"""Commands on a script, each in a fresh copy of its repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..rows import HERE
from ..same_training.run import RECORDER, ended, told
from .scripts import Script

_LIMIT_S = 1800.0


class Failure(RuntimeError):
    """A command that did not do what it is for, in words."""


def without_folders(said: Any) -> Any:
    """What was said, without the folders of paths that are absolute, or lead out of this one: they are of a machine."""
    if isinstance(said, str):
        return re.sub(r"(?<![\w.:/])(?:\.\.)?/(?:[^\s/'\":]+/)+", "", said)
    if isinstance(said, dict):
        return {key: without_folders(value) for key, value in said.items()}
    return [without_folders(one) for one in said] if isinstance(said, list) else said


class Place:
    """Where a script's commands run, and what is kept of them."""

    def __init__(self, script: Script, folder: Path, kept: Path) -> None:
        """
        Args:
            script: the script.
            folder: where the repositories lie.
            kept: the plan is written here, and what the commands printed.
        """
        self._script, self._folder = script, folder
        self.plan = kept / f"{script.name}.yaml"
        """The plan's file, once it was searched for."""

    def search(self, max_time: str | None) -> float:
        """A default search, as a user starts it; its plan is written.

        Args:
            max_time: of ``--max-time``; None, without it.

        Returns:
            Seconds that it took.

        Raises:
            Failure: it wrote none.
        """
        storage = f"sqlite:///{self.plan.with_suffix('.db')}"
        options = ["-o", str(self.plan), "--storage", storage, "--verbose"]
        began_s = time.monotonic()
        self._autotune("search", [*options, "--max-time", max_time] if max_time else options)
        return time.monotonic() - began_s

    def verify(self) -> dict[str, Any]:
        """What `autotune verify` says of the plan.

        Raises:
            Failure: it could not measure it.
        """
        found: dict[str, Any] = json.loads(self._autotune("verify", [str(self.plan), "--json"]))
        return found

    def train(self, num_steps: int, is_planned: bool) -> tuple[dict[str, Any], list[str]]:
        """Run the script until it has taken so many optimizer steps.

        Returns:
            Of the recorder, see there; and what autotune said.

        Raises:
            Failure: it ended before.
        """
        job = [sys.executable, *self._script.command]
        command = [sys.executable, "-m", "autotune", "run", str(self.plan), "--", *job] if is_planned else job
        with tempfile.TemporaryDirectory(prefix="autotune-public-") as name, self._copied() as place:
            recorded = {"SAME_TRAINING_RECORD": name, "SAME_TRAINING_STEPS": str(num_steps)}
            job_ended = ended(command, place, {**self._environment(RECORDER), **recorded}, _LIMIT_S)
            found = [json.loads(path.read_text(encoding="utf-8")) for path in Path(name).iterdir()]
        self._keep("with the plan" if is_planned else "as it stands", job_ended.stderr)
        record = max(found, key=lambda one: len(one["steps"]), default={"steps": []})
        if len(record["steps"]) != num_steps:
            last = "\n".join(job_ended.stderr.strip().splitlines()[-5:])
            raise Failure(f"{' '.join(command)}: {len(record['steps'])} of {num_steps} steps: {last}")
        return record, told(job_ended.stderr)

    def _autotune(self, what: str, options: list[str]) -> str:
        command = [sys.executable, "-m", "autotune", what, *options, "--", sys.executable, *self._script.command]
        with self._copied() as place:
            job = ended(command, place, self._environment(), _LIMIT_S)
        self._keep(what, f"{job.stderr}\n{job.stdout}")
        if job.returncode not in (0, 3):
            raise Failure(f"{what} ended with {job.returncode}: {job.stderr[-500:]}")
        return job.stdout

    @contextmanager
    def _copied(self) -> Iterator[Path]:
        """The repository as it was prepared: what a run before left is not in it."""
        with tempfile.TemporaryDirectory(prefix="autotune-public-") as name:
            place = Path(name, self._script.name)
            shutil.copytree(
                self._folder / self._script.name, place, symlinks=True, ignore=shutil.ignore_patterns(".git")
            )
            yield place

    def _environment(self, *first: Path) -> Mapping[str, str]:
        paths = [*first, HERE.parent, self._folder / "site"]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}

    def _keep(self, what: str, said: str) -> None:
        self.plan.with_name(f"{self._script.name}, {what}.txt").write_text(said, encoding="utf-8")
