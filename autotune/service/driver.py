"""One search's driver: ``autotune search`` in a session and a folder of its own, followed by its progress file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from ..batch.turns_of_server import SOCKET
from ..workers.process import ProcessId, end, end_all_with, identify
from .findings import Documents, read_documents
from .spec import SearchSpec, arguments
from .turns import DriverTurns, SearchTurns
from .users import User, take_back

PROGRAM = (sys.executable, "-P", "-m", "autotune")
"""``-P``: a job may have a file ``autotune.py``, and is the current folder."""
_SEARCH, _MARK = "AUTOTUNE_SERVICE_SEARCH", "AUTOTUNE_SERVICE_DRIVER"
"""Environment variables of a driver and of all that comes of it: by the second, which the search's next driver does not
have, they are found when nobody is left to ask."""
_KEPT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER", "PYTHONPATH", "VIRTUAL_ENV"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"),
)
_KEPT_PREFIXES = (
    *("CUDA_", "NVIDIA_", "OMP_", "MKL_", "RAY_", "TORCH", "XDG_", "LD_"),
    *("PYTORCH_", "CUBLAS_", "CUDNN_", "NCCL_", "TRITON_", "MALLOC_"),
)
"""Environment variables of the server that a driver gets, beside those of ``--pass-env``. What decides how memory is
allocated and kernels are chosen is among them: trials run as jobs on that machine do."""
_SECRET = re.compile("(?!RAY_).*(TOKEN|SECRET|PASSWORD|CREDENTIAL|API_KEY)")
"""None of those, whatever it begins with; Ray's own lets a driver into its cluster, and no trial has it."""
_PLAN = "../plan.yaml"
"""Seen from the job's folder, so that what a driver says of it holds no path of the server's."""
_LOG_BYTES = 256 * 2**10
_PROGRESS_BYTES = 4 * 2**20
_LONGEST_LINE_BYTES = 64 * 2**20
_KIND = re.compile(r"[a-z_]{1,40}")
_OWN_KINDS = ("state", "priority", "driver_started", "end", "refused")
"""Events that are the service's to tell."""
_MOST_LOG_BYTES = 4 * 2**20
_CUT = b"[what was printed before was cut]\n"


@dataclass(frozen=True)
class SearchFolder:
    """Where a search's files are."""

    path: Path

    @property
    def work(self) -> Path:
        """The job's own files, where its driver runs."""
        return self.path / "work"

    @property
    def plan(self) -> Path:
        """What a search ends with."""
        return self.path / "plan.yaml"

    @property
    def measurements(self) -> Path:
        """What all searches of the server have measured."""
        return self.path.parents[1] / "measurements.db"

    @property
    def log(self) -> Path:
        """What its drivers printed."""
        return self.path / "driver.log"

    @property
    def result(self) -> Path:
        """The JSON document on a driver's stdout."""
        return self.path / "result.json"

    def progress(self, attempt: int) -> Path:
        """The events of one driver."""
        return self.path / f"progress-{attempt}.jsonl"

    def read_progress(self, attempt: int, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Whole lines from ``offset`` on, and the offset behind them; what is no event is left out, as is a line that
        is longer than any."""
        try:
            with self._open(self.progress(attempt).name) as file:
                file.seek(offset)
                data = file.read(_PROGRESS_BYTES)
                while b"\n" not in data and len(data) < _LONGEST_LINE_BYTES and (more := file.read(_PROGRESS_BYTES)):
                    data += more
        except OSError:
            return [], offset
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) >= _LONGEST_LINE_BYTES else b"")
        rows = [row for line in whole.splitlines() if (row := _event(line)) is not None]
        return rows, offset + len(whole)

    def read_log(self) -> str:
        """The end of what the drivers printed, which names the plan as `autotune fetch` does."""
        try:
            with self._open(self.log.name) as file:
                file.seek(max(os.fstat(file.fileno()).st_size - _LOG_BYTES, 0))
                return _storable(file.read().decode(errors="replace")).replace(_PLAN, "plan.yaml")
        except OSError:
            return ""

    def cut_log(self) -> None:
        """Keep the end of a long log alone: a flood would fill the disk of all searches. Drivers append to it, so that
        they go on where it ends."""
        with contextlib.suppress(OSError), self._open(self.log.name, flags=os.O_RDWR | os.O_APPEND, mode="ab+") as file:
            if file.seek(0, os.SEEK_END) > _MOST_LOG_BYTES:
                file.seek(-_LOG_BYTES, os.SEEK_END)
                kept = file.read(_LOG_BYTES)
                file.truncate(0)
                file.write(_CUT + kept)

    def read_trial_log(self, study: str, number: int) -> str | None:
        """What a trial printed; None where nothing is kept."""
        parts = (self.work.name, ".autotune", study, f"trial-{number:03d}.log")
        with contextlib.suppress(OSError, ValueError), self._open(*parts) as file:  # a name that no file has
            return file.read(_LOG_BYTES).decode(errors="replace")
        return None

    def read_error(self) -> tuple[str, str]:
        """What the last driver said of its end, and the error's kind; empty where it could not."""
        with contextlib.suppress(OSError, ValueError, AttributeError), self._open(self.result.name) as file:
            document = json.loads(file.read(2**20))
            return _storable(str(document.get("error", "")))[:4000], str(document.get("kind", ""))
        return "", ""

    def read_documents(self) -> Documents | None:
        """The plan with what belongs to it; None where there is none, or what a driver does not leave beside it."""
        try:
            with os.scandir(self.path) as entries:
                found = [(each.is_dir(follow_symlinks=False), each.stat(follow_symlinks=False)) for each in entries]
        except OSError:
            return None
        is_plain = all(is_folder or (stat.S_ISREG(of.st_mode) and of.st_nlink == 1) for is_folder, of in found)
        return read_documents(self.plan) if is_plain else None

    def begin_output(self) -> tuple[IO[bytes], IO[bytes]]:
        """A driver's stdout, a new one, and its stderr, which goes on; no plan is left.

        Raises:
            OSError: they cannot be opened.
        """
        for path in (self.plan, self.result):
            path.unlink(missing_ok=True)
        new, more = os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = self._open(self.log.name, flags=more, mode="ab")
        return self._open(self.result.name, flags=new, mode="wb"), log

    def _open(self, *parts: str, flags: int = os.O_RDONLY, mode: str = "rb") -> IO[bytes]:
        """A plain file in this folder, by its only name: a task may have put a link or a pipe there.

        Raises:
            OSError: it is none.
        """
        if any("/" in part or part in ("", ".", "..") for part in parts):
            raise FileNotFoundError(errno.ENOENT, "no name of a file", parts[-1])
        here = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts[:-1]:
                above, here = here, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                os.close(above)
            file = os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=here)
        finally:
            os.close(here)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            os.close(file)
            raise FileNotFoundError(errno.ENOENT, "no plain file", parts[-1])
        return os.fdopen(file, mode)


class ServerSide(Protocol):
    """Parts of a driver's command line that the server decides."""

    @property
    def program(self) -> tuple[str, ...]:
        """Its beginning."""

    @property
    def driver_options(self) -> tuple[str, ...]:
        """Options of ``autotune search``."""

    @property
    def pass_env(self) -> tuple[str, ...]:
        """Names of environment variables that it gets from the server."""

    @property
    def user(self) -> User | None:
        """Whose process it is, where that is another than the server's."""


class Driver:
    """A driver that runs."""

    def __init__(
        self,
        search_id: str,
        spec: SearchSpec,
        folder: SearchFolder,
        attempt: int,
        server: ServerSide,
        turns: SearchTurns,
    ) -> None:
        """Start it.

        Args:
            search_id: marks its processes.
            spec: what to search.
            folder: its files; the job's are there.
            attempt: 1 for the first; later ones go on from the study.
            server: what is not the spec's to say.
            turns: that its trials take with other searches'.

        Raises:
            OSError: it could not be started.
        """
        user = server.user
        place = None if spec.folder is None else Path(spec.folder)
        command = [
            *server.program,
            "search",
            "--json",
            f"--output={_PLAN}",
            f"--progress={folder.progress(attempt)}",
            f"--storage=sqlite:///{folder.path}/study.db",
            f"--measurements=sqlite:///{folder.measurements if user is None else f'{folder.path}/measurements.db'}",
            *(["--resume"] if attempt > 1 else []),
            *server.driver_options,
            *arguments(spec, place),
        ]
        environment = driver_environment(os.environ, server.pass_env, search_id, attempt)
        result, log = folder.begin_output()
        if user is not None:
            environment = {k: v for k, v in environment.items() if not k.startswith("XDG_")} | user.environment(
                folder.path
            )
            user.give(folder.path)
        with result, log, ExitStack() as undone:
            self._turns = DriverTurns(turns, search_id, 1.0 + spec.priority)
            undone.callback(self._turns.close)
            environment[SOCKET] = str(self._turns.theirs.fileno())
            if user is not None:
                undone.callback(take_back, folder.path)
            self.process = subprocess.Popen(
                command,
                cwd=folder.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=log,
                start_new_session=True,
                pass_fds=(self._turns.theirs.fileno(),),
                **({} if user is None else user.process),
            )
            undone.pop_all()
        self._turns.begin()
        self.id = identify(self.process.pid) or ProcessId(self.process.pid, 0)
        self._search_id, self._attempt, self._has_ended = search_id, attempt, False
        self._user, self._folder = user, folder

    def ask_to_end(self) -> None:
        """As Ctrl-C does: once finishes the running trials, twice stops at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int | None:
        """None while it runs; negative after a signal."""
        return self.process.poll()

    def end(self) -> None:
        """End it with all that came of it, whatever it does; again does nothing, for to look takes a while."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._user is not None:
            self._user.end_all()
            with contextlib.suppress(FileNotFoundError):
                take_back(self._folder.path)
        end_leftovers(self._search_id, self._attempt, self.id)
        self.process.wait()
        self._turns.close()


def end_leftovers(search_id: str, attempt: int, driver: ProcessId | None) -> None:
    """End what is left of one driver of a search: it, by its pid and start, and all that came of it, by their mark. A
    server that comes too late so leaves its successor's driver alone."""
    if driver is not None:
        end([driver])
    end_all_with(f"{_MARK}={search_id}-{attempt}")


def _event(line: bytes) -> dict[str, Any] | None:
    """An event that a driver has written; None of anything else that a task, which may write there too, has."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line, parse_constant=lambda name: None)  # no JSON has NaN
        if isinstance(row, dict) and isinstance(kind := row.get("event"), str):
            resumed = row.get("resumed")
            trials = [row, *(resumed if isinstance(resumed, list) else [])]
            known = _KIND.fullmatch(kind) and kind not in _OWN_KINDS
            return row if known and all(map(_can_be_trial, trials)) else None
    return None


def _can_be_trial(row: Any) -> bool:
    """Whether what a row says of a trial, if it does, can be stored."""
    if not isinstance(row, dict):
        return False
    number, outcome = row.get("number", 0), row.get("outcome", "")
    is_number = isinstance(number, int) and 0 <= number < 2**31
    return is_number and isinstance(outcome, str) and len(outcome) <= 40 and "\0" not in outcome


def _storable(text: str) -> str:
    """Text as every database takes it: PostgreSQL no null character, and none half of one in UTF-16."""
    return text.encode(errors="replace").decode().replace("\0", r"\0")


def driver_environment(own: Mapping[str, str], passed: Collection[str], search_id: str, attempt: int) -> dict[str, str]:
    """What a driver gets of the server's environment, with its mark."""
    plain = {key for key in own if key in _KEPT or (key.startswith(_KEPT_PREFIXES) and not _SECRET.match(key))}
    kept = {key: value for key, value in own.items() if key in plain.union(passed)}
    return {**kept, _SEARCH: search_id, _MARK: f"{search_id}-{attempt}", "NO_COLOR": "1"}
