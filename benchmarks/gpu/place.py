"""Where checks run: trials, jobs and processes of their own, and a watch over the card's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.measure import MeasureOptions
from autotune.measure.measurement import InspectOptions, Measurement
from autotune.plan import Budget, Plan
from autotune.techniques import Facts, Settings
from autotune.workers import Executor, Inspected, InspectRequest, Measured, MeasureRequest, Outcome
from autotune.workers.local import LocalExecutor
from autotune.workers.trial.environment import own_thread_variables

from ..rows import EXAMPLES, HERE
from .check import Skipped

ROOT = HERE.parent
GPT = str(EXAMPLES / "char_gpt" / "model.py")
CNN = str(EXAMPLES / "digits_cnn" / "model.py")
_WATCH_S = 0.05


def task(name: str) -> str:
    """One of ``tasks.py``."""
    return f"{HERE / 'gpu' / 'tasks.py'}:{name}"


@dataclass
class Watch:
    """NVML's used memory of the whole card, twenty times a second."""

    used: list[int] = field(default_factory=list)

    @property
    def most_bytes(self) -> int:
        """More than before it began."""
        return max(self.used) - self.used[0]


@dataclass
class Place:
    """One card, and a folder for what checks write."""

    folder: Path
    is_quick: bool
    """Times are short: for a run that shows that the checks run, not what a card does."""

    @cached_property
    def executor(self) -> LocalExecutor:
        """On the first card."""
        found = LocalExecutor("cuda")
        self._opened = found
        return found

    _opened: LocalExecutor | None = None

    def close(self) -> None:
        """End what was started."""
        if self._opened is not None:
            self._opened.close()

    @property
    def trial_s(self) -> float:
        """Of timed windows."""
        return 0.5 if self.is_quick else 3.0

    def trial(
        self,
        source: str,
        settings: Settings | None = None,
        limit: int | None = None,
        fresh: bool = False,
        deadline_s: float = 300.0,
        executor: Executor | None = None,
        **options: Any,
    ) -> Outcome:
        """One trial, held to ``limit`` bytes where there is one."""
        budget = Budget(limit=limit, device="cuda")
        stated: dict[str, Any] = {"trial_time_s": self.trial_s, "precision": 1e-3, "parity_batch": None, **options}
        request = MeasureRequest(
            id="gpu",
            task=source,
            device="cuda",
            plan=Plan(settings=settings or Settings(), budget=budget),
            options=MeasureOptions(budget=budget, **stated),
            fresh=fresh,
            deadline_s=deadline_s,
            environment=own_thread_variables(),
        )
        return (executor or self.executor).submit(request).result()

    def measured(self, source: str, settings: Settings | None = None, **options: Any) -> Measurement:
        """The same of a trial that must run to its end.

        Raises:
            RuntimeError: it did not.
        """
        found = self.trial(source, settings, **options)
        if not isinstance(found, Measured):
            raise RuntimeError(f"{Path(source).name}: {found.kind}: {getattr(found, 'message', '')}")
        return found.measurement

    def facts(self, source: str) -> Facts:
        """Of a task on the card."""
        request = InspectRequest(id="gpu", task=source, device="cuda", options=InspectOptions(allow_split=True))
        found = self.executor.submit(request).result()
        if not isinstance(found, Inspected):
            raise RuntimeError(f"{Path(source).name}: {getattr(found, 'message', found)}")
        return found.facts

    def alone(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """What a function of this package's comes to in a process of its own."""
        return json.loads(run([*self.started(function, **arguments)]).splitlines()[-1])

    def started(self, function: Callable[..., Any], **arguments: Any) -> list[str]:
        """The command that does so."""
        named = f"{function.__module__}:{function.__qualname__}"
        return [sys.executable, "-m", "benchmarks.gpu.alone", named, json.dumps(arguments)]

    def command(self, *words: str) -> str:
        """What ``autotune`` prints."""
        return run([sys.executable, "-m", "autotune", *words])

    def job(self, source: str, plan: Path, num_steps: int) -> dict[str, float]:
        """Samples per second and peak of a plain script that applies a plan, started as a job is."""
        job = [sys.executable, str(HERE / "plain_job.py"), source, str(num_steps)]
        found: dict[str, float] = json.loads(self.command("run", str(plan), "--", *job).splitlines()[-1])
        return found

    @contextmanager
    def holder(self, **arguments: Any) -> Iterator[subprocess.Popen[str]]:
        """Another process that holds memory, and computes, until the end of the block; see ``tasks.hold``."""
        from .tasks import hold

        other = subprocess.Popen(
            self.started(hold, **arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert other.stdout is not None
        try:
            if not other.stdout.readline():
                raise RuntimeError(f"the process that is to hold the card's memory ended with {other.wait()}")
            yield other
        finally:
            other.kill()
            other.communicate()

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """The card's used memory during the block.

        Raises:
            Skipped: NVML does not tell.
        """
        found, is_over = Watch([used_bytes()]), threading.Event()

        def read() -> None:
            while not is_over.wait(_WATCH_S):
                found.used.append(used_bytes())

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            is_over.set()
            thread.join()


def run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        RuntimeError: it ended with another code than 0; its last words.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    return done.stdout


def handle() -> Any:
    """NVML's, of the card that CUDA counts first.

    Raises:
        Skipped: NVML is not there.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        if visible.startswith("GPU-"):
            return pynvml.nvmlDeviceGetHandleByUUID(visible)
        return pynvml.nvmlDeviceGetHandleByIndex(int(visible or 0))
    except (ImportError, pynvml.NVMLError) as reason:
        raise Skipped(f"NVML cannot be asked: {reason}") from None


def used_bytes() -> int:
    """The card's used memory, by NVML."""
    import pynvml

    return int(pynvml.nvmlDeviceGetMemoryInfo(handle()).used)
