"""The command line: in a process of its own, with what it leaves behind, or in this one, which is ten times quicker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.workers import Executor, Outcome
from autotune.workers.request import TrialRequest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = (sys.executable, "-m", "autotune")
ONE_ROUND = (
    sys.executable,
    "-P",
    "-c",
    "from autotune.searches.winner import finalists; finalists.MOST_ROUNDS = 1; from autotune.cli import main; main()",
)
"""The same, with finalists that run once in fresh interpreters: how often they must is shown over tables."""
_MARK = "AUTOTUNE_TEST_MARK"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str
    left_behind: list[int]
    """Pids of processes that were still there when it had ended, grandchildren and daemons included."""


def environment(**extra: str) -> dict[str, str]:
    """This environment with the checkout importable and nothing that changes the output's form."""
    kept = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": str(ROOT), **extra}


class Running:
    """``autotune`` at work, in a session of its own, marked so that all that comes of it can be found."""

    def __init__(
        self, arguments: tuple[str | Path, ...], cwd: Path, extra: Mapping[str, str], program: tuple[str, ...] = PROGRAM
    ) -> None:
        mark = uuid.uuid4().hex
        self._mark = f"{_MARK}={mark}"
        self.process = subprocess.Popen(
            [*program, *map(str, arguments)],
            cwd=cwd,
            env=environment(**{_MARK: mark}, **extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_heed_signals,
        )

    def read_until(self, words: str) -> str:
        """Standard error, line by line, up to the line that has ``words``."""
        said = ""
        for line in self.process.stderr:
            said += line
            if words in line:
                return said
        raise AssertionError(f"{words!r} was never said:\n{said}")

    def finish(self, timeout_s: float = 600) -> Ended:
        """Wait for the end."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            stdout, stderr = self.process.communicate()
            raise AssertionError(f"no end within {timeout_s} s:\n{stdout}\n{stderr}") from None
        return Ended(self.process.returncode, stdout, stderr, marked_processes(self._mark))


def start(*arguments: str | Path, cwd: Path, program: tuple[str, ...] = PROGRAM, **extra: str) -> Running:
    """Start ``autotune``; ``extra`` adds environment variables."""
    return Running(arguments, cwd, extra, program)


def autotune(*arguments: str | Path, cwd: Path, timeout_s: float = 600, **extra: str) -> Ended:
    """Run ``autotune`` to its end; ``extra`` adds environment variables."""
    return Running(arguments, cwd, extra).finish(timeout_s)


def run_here(
    executor: Executor,
    patch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str | Path,
    cwd: Path,
    **extra: str,
) -> Ended:
    """Run ``autotune`` to its end in this process: the same parsing, words and exit code. Local trials run where the
    session's do, so that torch is imported once; that nothing is left behind is for processes of their own to show."""
    patch.chdir(cwd)
    patch.setattr(sys, "argv", ["autotune", *map(str, arguments)])
    patch.setattr("autotune.workers.local.LocalExecutor", lambda *said: _Lent(executor))
    patch.setattr("autotune.workers.process.adopt_orphans", lambda: None)  # this process has other children
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        patch.delenv(name, raising=False)
    for name, value in extra.items():
        patch.setenv(name, value)
    capsys.readouterr()  # what was printed before
    with _signals_kept(), pytest.raises(SystemExit) as ended:
        main()
    return Ended(ended.value.code or 0, *capsys.readouterr(), left_behind=[])


class _Lent(Executor):
    """Another's executor, which stays open."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.num_slots = executor.num_slots

    def submit(self, request: TrialRequest) -> Future[Outcome]:
        return self._executor.submit(request)

    def close(self) -> None:
        pass


@contextmanager
def _signals_kept() -> Iterator[None]:
    """A command ignores them as it ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heed_signals() -> None:
    """A shell has what it runs in the background ignore Ctrl-C, and its children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def marked_processes(mark: str) -> list[int]:
    """Pids of all processes that were started with a mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found
