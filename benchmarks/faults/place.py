"""Where a fault happens: folders of its own, with a private ``/tmp`` and ``/dev/shm``, and what is left there."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.apart import may_mount

from . import processes
from .ended import LONG_S, Ended, Running

ROOT = Path(__file__).resolve().parents[2]
MARK = "AUTOTUNE_FAULT_CLUSTER"
"""In the environment of a lane's shared Ray cluster, and so of its idle workers: these are not left behind."""
_BASE = Path(os.environ.get("AUTOTUNE_FAULTS", "/var/tmp"))
"""Not below ``/tmp``, which each command has for itself."""
_OWN_TMP = 'mount --bind "$1" /tmp && mount --bind "$2" /dev/shm && shift 2 && exec "$@"'
_GRACE_S = 8.0
"""How long what ends a killed driver's processes may take."""
_OF_TORCH = ("torchinductor_", "hsperfdata_", "pymp-")
"""What libraries keep in the temporary folder for the next process."""
_EXPECTED = {".autotune", "plan.yaml"}


class Place:
    """Folders for one fault: ``work`` (where commands run), ``tmp`` (their ``/tmp``), ``shm``, ``home``, ``told``."""

    def __init__(self, template: Path) -> None:
        self.template = template
        """A folder with a small study: see ``study.make_template``."""
        self.root = Path(tempfile.mkdtemp(prefix="autotune-faults-", dir=_BASE))
        self.shm = Path(tempfile.mkdtemp(prefix="autotune-faults-", dir="/dev/shm"))
        self.work, self.tmp, self.home, self.told = (self.root / name for name in ("work", "tmp", "home", "told"))
        """``told`` is where the task says what it does, and is told to wait."""
        for folder in (self.work, self.tmp, self.home, self.told):
            folder.mkdir()
        self.tmp.chmod(0o1777)
        self.expected: set[str] = set(_EXPECTED)
        """Names that may stand in ``work`` at the end."""
        self._mounts: list[Path] = []
        self._before = set(processes.below(os.getpid()))
        self._num_runs = 0

    def write(self, name: str, content: str | bytes) -> Path:
        """A file in ``work``."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.expected.add(Path(name).parts[0])
        return path

    def take_template(self) -> None:
        """A study of two trials, with its task and its space."""
        shutil.copytree(self.template, self.work, dirs_exist_ok=True)
        self.expected |= {path.name for path in self.template.iterdir()}

    def mount(self, path: Path, size: str) -> None:
        """A disk of its own at ``path``: what is there is covered."""
        path.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
        self._mounts.append(path)

    def environment(self, **extra: str) -> dict[str, str]:
        """This environment, with the checkout importable and nothing that changes the output's form."""
        dropped = {"FORCE_COLOR", "NO_COLOR", "COLUMNS", "TMPDIR", "RAY_ADDRESS", "AUTOTUNE_PLAN"}
        kept = {key: value for key, value in os.environ.items() if key not in dropped}
        own = {"PYTHONPATH": str(ROOT), "HOME": str(self.home), "OMP_NUM_THREADS": "1", "FAULT_TOLD": str(self.told)}
        return {**kept, **own, **extra}

    def start(
        self,
        *arguments: str | Path,
        program: Sequence[str] = (sys.executable, "-m", "autotune"),
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        **streams: Any,
    ) -> Running:
        """``autotune`` at work, in a session of its own; ``streams`` go to :class:`subprocess.Popen`."""
        self._num_runs += 1
        out, err = (self.root / f"{name}-{self._num_runs}" for name in ("stdout", "stderr"))
        command = [*self._prefix(), *program, *map(str, arguments)]
        with out.open("wb") as own_out, err.open("wb") as own_err:
            options = {"stdin": subprocess.DEVNULL, "stdout": own_out, "stderr": own_err, "cwd": self.work, **streams}
            process = subprocess.Popen(
                command,
                env=self.environment(**(environment or {})),
                start_new_session=True,
                preexec_fn=lambda: _prepare(prepare),
                **options,
            )
        return Running(process, out, err)

    def run(self, *arguments: str | Path, timeout_s: float = LONG_S, **options: Any) -> Ended:
        """``autotune`` from its start to its end."""
        return self.start(*arguments, **options).finish(timeout_s)

    def left_behind(self) -> list[str]:
        """Processes and files that are still here: complaints."""
        until_s = time.monotonic() + _GRACE_S
        while (left := self._processes()) and time.monotonic() < until_s:
            processes.reap()
            time.sleep(0.05)
        said = [f"process left: {processes.words(process)[:80]}" for process in left]
        return said[:3] + self._files()

    def close(self) -> None:
        """End what was started here, and remove the folders."""
        for _ in range(3):
            processes.end(self._processes())
        processes.reap()
        for path in reversed(self._mounts):
            subprocess.run(["umount", "--lazy", str(path)], check=False)
        for folder in (self.root, self.shm):
            shutil.rmtree(folder, ignore_errors=True)

    def _processes(self) -> list[processes.Process]:
        """What came of this fault: a lane has one fault at a time, and is asked for all its descendants."""
        found = []
        for process in processes.below(os.getpid()):
            mine = processes.variables(process)
            of_cluster = any(one.startswith(MARK.encode()) for one in mine)
            is_trial = any(one.startswith(b"AUTOTUNE_SERVER") for one in mine)
            if process not in self._before and (is_trial or not of_cluster):
                found.append(process)
        return found

    def _files(self) -> list[str]:
        found = []
        for name, folder in (("/tmp", self.tmp), ("/dev/shm", self.shm)):
            left = [path.name for path in folder.iterdir() if not path.name.startswith(_OF_TORCH)]
            found += [f"file left in {name}: {one}" for one in sorted(left)[:3]]
        if self.work.is_dir():
            left = [path.name for path in self.work.iterdir()]
            found += [f"file left: {one!r}" for one in sorted(set(left) - self.expected)[:3] if one != "__pycache__"]
        return found

    def _prefix(self) -> list[str]:
        if not may_mount():
            return []
        return [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            _OWN_TMP,
            "sh",
            str(self.tmp),
            str(self.shm),
        ]


@contextmanager
def place_of(template: Path) -> Iterator[Place]:
    """A place, gone afterwards."""
    place = Place(template)
    try:
        yield place
    finally:
        place.close()


def _prepare(more: Callable[[], None] | None) -> None:
    """In the child: heed Ctrl-C, which a shell's background has ignored, and write no core of a crash."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if more is not None:
        more()
