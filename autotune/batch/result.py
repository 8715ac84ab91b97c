"""What has come of a job of a batch, whether it ran here or at a service: its row of the summary, and of the table."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from ..files import write_text
from ..plain_yaml import dump_yaml
from ..plan import Plan
from ..searches.options import SearchOptions
from ..techniques import Device
from .jobs import SUMMARY, Job

State = Literal["waiting", "running", "done", "nothing fits", "interrupted", "failed", "bug"]


@dataclass
class JobResult:
    """A job and what has come of it."""

    job: Job
    options: SearchOptions
    state: State = "waiting"
    plan: Plan | None = None
    why: str = ""
    """Why there is no plan, or not the best."""
    device: Device | None = None
    """As the worker read it."""
    device_s: float | None = 0.0
    """Device time that it has used, seconds; None where only a service knows it."""

    @property
    def spec(self) -> str:
        """Hash of what was asked for."""
        return hashlib.sha256(self.job.model_dump_json().encode()).hexdigest()[:16]

    def as_row(self) -> dict[str, Any]:
        """For the summary."""
        row: dict[str, Any] = {"name": self.job.name, "state": self.state, "spec": self.spec}
        if self.device is not None:
            row["device"] = self.device.name
        if self.plan is not None and self.plan.search is not None:
            row["plan"] = str(self.options.output)
            row |= {"trials": self.plan.search.trials, "known": self.plan.search.known or 0}
            if self.plan.gain is not None:
                row["gain"] = self.plan.gain.speed
        row |= {"device_s": None if self.device_s is None else round(self.device_s, 1), "why": self.why}
        return {name: value for name, value in row.items() if value not in (None, "")}


def write_summary(folder: Path, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write what came of each job.

    Raises:
        UserError: it cannot be written.
    """
    document = {"schema": "autotune/batch@1", "jobs": list(rows), **more}
    write_text(folder / SUMMARY, dump_yaml(document), UserError)
