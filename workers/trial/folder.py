"""A trial's folder: how request and answer pass between a supervisor and its trial.

Files, because a trial's code may close, overwrite or print to any file descriptor that it finds open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from pydantic import ValidationError

from ...plan import Peak
from ..outcome import OUTCOME, Lost, Outcome
from ..request import REQUEST, TrialRequest

NO_FOLDER = 117
"""The exit code of a trial that could not tell what it came to; why is the last line that it printed."""

_STARTING = "starting"
_COMPARING = "comparing losses"
"""The phase after the peak is known."""


def check_working_folder() -> Lost | None:
    """What a trial comes to whose current folder, which is this process's, was deleted; None where it is there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        name = os.readlink("/proc/self/cwd") if os.path.islink("/proc/self/cwd") else "the working folder"
        return Lost(message=f"{name}: trials run in this folder, and it is gone. Make it again, and start again there.")
    return None


class FolderLost(Exception):
    """The folder is gone, or there is no room in it: whatever the trial comes to cannot be told."""

    def __init__(self, path: Path, reason: OSError) -> None:
        super().__init__(
            f"{path}: the trial's files cannot be kept there: {reason.strerror or reason}. "
            "Make room there, or name another folder with TMPDIR."
        )


@dataclass(frozen=True)
class TrialFolder:
    """One trial's files."""

    path: Path
    """A folder of its own. What writes there raises :class:`FolderLost` where that cannot be done."""
    answer: str = "outcome"
    """What its answer's file is called: of several processes, each has one."""

    def of_rank(self, rank: int) -> TrialFolder:
        """The same for one of several processes."""
        return dataclasses.replace(self, answer=f"outcome-{rank}")

    def make(self) -> None:
        """Make it, and the folders above it where they are gone."""
        with self._held():
            self.path.mkdir(parents=True)

    def is_there(self) -> bool:
        """Whether nobody has removed it."""
        return self.path.is_dir()

    @property
    def stack(self) -> Path:
        """Where the trial's faulthandler writes."""
        return self.path / "stack"

    def write_request(self, request: TrialRequest) -> None:
        """Ask."""
        self._write("request.json", request.model_dump_json(by_alias=True))

    def read_request(self) -> TrialRequest:
        """What was asked."""
        with self._held():
            return REQUEST.validate_json((self.path / "request.json").read_bytes())

    def answer_anew(self, spawned_s: float) -> NoReturn:
        """Become a new interpreter that answers what was asked."""
        os.execv(sys.executable, self.anew(spawned_s))

    def anew(self, spawned_s: float) -> list[str]:
        """The command of a new interpreter that answers what was asked."""
        return [sys.executable, "-P", "-m", f"{__package__}.child", str(self.path), repr(spawned_s)]

    def write_phase(self, phase: str) -> None:
        """Say what the trial is about to do: ``loading the task``."""
        self._write("phase", phase)

    def read_phase(self) -> str:
        """What the trial was doing last."""
        with contextlib.suppress(OSError):
            return (self.path / "phase").read_text(encoding="utf-8")
        return _STARTING

    def has_begun(self) -> bool:
        """Whether the trial came as far as the task's code."""
        return self.read_phase() != _STARTING

    def write_compiling(self, seconds: float, is_compiling: bool) -> None:
        """Say how long torch.compile has taken so far, as it begins and as it has ended."""
        since = repr(time.monotonic()) if is_compiling else ""
        self._write("compiling", f"{seconds!r} {since}")

    def read_compiled_s(self) -> float:
        """How long it has taken by now; 0 where nothing was compiled."""
        with contextlib.suppress(OSError):
            seconds, *since = map(float, (self.path / "compiling").read_text().split())
            return seconds + sum(time.monotonic() - began_s for began_s in since)
        return 0.0

    def write_measured(self) -> None:
        """Say that the peak is known: what follows is no part of it."""
        self.write_phase(_COMPARING)

    def is_measured(self) -> bool:
        """Whether the trial's peak is known."""
        return self.read_phase() == _COMPARING

    def write_outcome(self, outcome: Outcome) -> None:
        """Answer, whole or not at all."""
        self._write(f"{self.answer}.json", outcome.model_dump_json(by_alias=True))

    def read_outcome(self) -> Outcome | None:
        """The answer; None where there is none that can be read."""
        with contextlib.suppress(OSError, ValidationError):
            return OUTCOME.validate_json((self.path / f"{self.answer}.json").read_bytes())
        return None

    def write_first_outcome(self, outcome: Outcome) -> None:
        """Answer, whole, unless another process of the trial has."""
        name = f"{self.answer}.{os.getpid()}"
        self._write(name, outcome.model_dump_json(by_alias=True))
        with self._held(), contextlib.suppress(FileExistsError):
            os.link(self.path / name, self.path / f"{self.answer}.json")

    def write_last_step(self, number: int) -> None:
        """Have the trial's processes end with this optimizer step."""
        self._write("last-step", str(number))

    def read_last_step(self) -> int:
        """With which they end; beyond all where nobody has said."""
        with contextlib.suppress(OSError):
            return int((self.path / "last-step").read_text())
        return sys.maxsize

    def write_peak(self, rank: int, peak: Peak) -> None:
        """Tell what one of the trial's processes was charged."""
        self._write(f"peak-{rank}.json", peak.model_dump_json())

    def read_peak(self, rank: int) -> Peak | None:
        """What that process was charged; None where it has not told yet."""
        with contextlib.suppress(OSError):
            return Peak.model_validate_json((self.path / f"peak-{rank}.json").read_bytes())
        return None

    def write_speaker(self) -> None:
        """Say that this process, and not the one that the trial began as, writes the trial's stack."""
        self._write("speaker", str(os.getpid()))

    def read_speaker(self) -> int | None:
        """Which process that is; None where it is the one that the trial began as."""
        with contextlib.suppress(OSError):
            return int((self.path / "speaker").read_text())
        return None

    def answered_ns(self) -> int:
        """When it was answered; for sorting. Later than all others where it was not."""
        with contextlib.suppress(OSError):
            return (self.path / f"{self.answer}.json").stat().st_mtime_ns
        return sys.maxsize

    def read_stack(self) -> str:
        """What faulthandler wrote of the trial's stack; empty where it could not."""
        with contextlib.suppress(OSError):
            return self.stack.read_text(encoding="utf-8", errors="replace")
        return ""

    def write_stacks(self) -> IO[str]:
        """Have this process's Python stack written there, as it crashes or as the supervisor asks for it; what is
        printed comes line by line from here on."""
        with self._held():
            stack = self.stack.open("w", encoding="utf-8")
        faulthandler.enable(stack, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # what was printed before a crash is not lost
        return stack

    def _write(self, name: str, text: str) -> None:
        """Whole, or not at all."""
        with self._held():
            partial = self.path / f"{name}.{os.getpid()}"  # others of the trial may write the same
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self.path / name)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        try:
            yield
        except OSError as reason:
            raise FolderLost(self.path, reason) from None
