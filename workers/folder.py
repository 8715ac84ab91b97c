"""A trial's folder: how request and answer pass between a supervisor and its trial.

Files, because a trial's code may close, overwrite or print to any file descriptor that it finds open.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ._base import TrialRequest
from .outcome import OUTCOME, Outcome

__all__ = ["TrialFolder"]


_COMPARING = "comparing losses"
"""The phase after the peak is known."""


@dataclass(frozen=True)
class TrialFolder:
    """One trial's files."""

    path: Path
    """An existing folder of its own."""

    @property
    def stack(self) -> Path:
        """Where the trial's faulthandler writes."""
        return self.path / "stack"

    def write_request(self, request: TrialRequest) -> None:
        """Ask."""
        (self.path / "request.json").write_text(request.model_dump_json(by_alias=True), encoding="utf-8")

    def read_request(self) -> TrialRequest:
        """What was asked."""
        return TrialRequest.model_validate_json((self.path / "request.json").read_text(encoding="utf-8"))

    def write_phase(self, phase: str) -> None:
        """Say what the trial is about to do: ``loading the task``."""
        (self.path / "phase").write_text(phase, encoding="utf-8")

    def read_phase(self) -> str:
        """What the trial was doing last."""
        with contextlib.suppress(OSError):
            return (self.path / "phase").read_text(encoding="utf-8")
        return "starting"

    def write_measured(self) -> None:
        """Say that the peak is known: what follows is no part of it."""
        self.write_phase(_COMPARING)

    def is_measured(self) -> bool:
        """Whether the trial's peak is known."""
        return self.read_phase() == _COMPARING

    def write_outcome(self, outcome: Outcome) -> None:
        """Answer, whole or not at all."""
        temporary = self.path / "outcome.partial"
        temporary.write_text(outcome.model_dump_json(by_alias=True), encoding="utf-8")
        os.replace(temporary, self.path / "outcome.json")

    def read_outcome(self) -> Outcome | None:
        """The answer; None where there is none that can be read."""
        with contextlib.suppress(OSError, ValidationError):
            return OUTCOME.validate_json((self.path / "outcome.json").read_bytes())
        return None

    def read_stack(self) -> str:
        """What faulthandler wrote of the trial's stack; empty where it could not."""
        with contextlib.suppress(OSError):
            return self.stack.read_text(encoding="utf-8", errors="replace")
        return ""
