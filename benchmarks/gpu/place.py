"""Where checks run: trials, jobs and processes of their own, and a watch over the card's memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autotune.measure import MeasureOptions
from autotune.measure.measurement import InspectOptions, Measurement
from autotune.plan import Budget, Evidence, Plan
from autotune.techniques import Facts, Settings
from autotune.workers import Inspected, InspectRequest, Measured, MeasureRequest, Outcome
from autotune.workers.devices import Gpu, visible_gpus
from autotune.workers.local import LocalExecutor
from autotune.workers.trial.environment import own_thread_variables

from ..rows import EXAMPLES, HERE
from .check import Skipped

ROOT = HERE.parent
GPT = str(EXAMPLES / "char_gpt" / "model.py")
CNN = str(EXAMPLES / "digits_cnn" / "model.py")
_WATCH_S = 0.05
_FORKED = multiprocessing.get_context("forkserver")
_FORKED_FROM = ("torch._dynamo", *(f"{__package__}.{name}" for name in ("exact", "memory", "speed", "surroundings")))
"""Processes of their own are forked from one that has imported these, and used no card."""


def begin_forks() -> None:
    """Start what processes of their own are forked from; it imports what they need meanwhile."""
    _FORKED.set_forkserver_preload([*_FORKED_FROM])
    forkserver.ensure_running()


def task(name: str) -> str:
    """One of ``tasks.py``."""
    return f"{HERE / 'gpu' / 'tasks.py'}:{name}"


def name_of(source: str) -> str:
    """``few_words``, or an example's folder."""
    return source.rpartition(":")[2] if ":" in source else Path(source).parent.name


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
    """The first card, and a folder for what checks write."""

    folder: Path
    is_quick: bool
    """Times are short: for a run that shows that the checks run, not what a card does."""
    cards: tuple[Gpu, ...] = field(default_factory=visible_gpus)
    """Of this machine. This process, and all that it starts, sees the first one alone."""

    def __post_init__(self) -> None:
        """Else a trial might run on one card, while another one is watched."""
        self._show(self.cards[:1])

    @contextmanager
    def all_cards(self) -> Iterator[None]:
        """What is started within sees all of them."""
        self._show(self.cards)
        try:
            yield
        finally:
            self._show(self.cards[:1])

    def _show(self, cards: Sequence[Gpu]) -> None:
        if cards:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(card.uuid for card in cards)

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
        return 0.3 if self.is_quick else 3.0

    @property
    def language(self) -> str:
        """A task of words."""
        return task("few_words") if self.is_quick else GPT

    @property
    def varying(self) -> str:
        """A task of words whose shapes vary."""
        return task("few_varying" if self.is_quick else "varying")

    @property
    def images(self) -> str:
        """A task of images."""
        return task("convolutions") if self.is_quick else CNN

    def request(
        self,
        source: str,
        settings: Settings | None = None,
        limit: int | None = None,
        known: Measurement | None = None,
        **options: Any,
    ) -> MeasureRequest:
        """For a trial.

        Args:
            source: the task.
            settings: None leaves it as it stands.
            limit: bytes that the trial is held to; None is none.
            known: of the task as it stands, where a search would have measured that by then.
            **options: of :class:`MeasureOptions`.
        """
        budget = Budget(limit=limit, device="cuda")
        stated: dict[str, Any] = {"trial_time_s": self.trial_s, "precision": 1e-3, "parity_batch": None, **options}
        reference = Evidence(samples_per_s=known.samples_per_s, peak=known.peak) if known is not None else None
        return MeasureRequest(
            id="gpu",
            task=source,
            device="cuda",
            plan=Plan(settings=settings or Settings(), budget=budget, reference=reference),
            options=MeasureOptions(budget=budget, **stated),
            deadline_s=300.0,
            environment=own_thread_variables(),
        )

    def trial(self, source: str, settings: Settings | None = None, **options: Any) -> Outcome:
        """What a trial comes to."""
        return self.executor.submit(self.request(source, settings, **options)).result()

    def once(self, request: MeasureRequest) -> Outcome:
        """What a trial comes to that is not tried again where it is lost."""
        return self.executor._slots[0].run(request)

    def measured(self, source: str, settings: Settings | None = None, **options: Any) -> Measurement:
        """The same of one that must run to its end; see :func:`measurement`."""
        return measurement(self.trial(source, settings, **options))

    def facts(self, source: str) -> Facts:
        """Of a task on the card."""
        request = InspectRequest(id="gpu", task=source, device="cuda", options=InspectOptions(allow_split=True))
        found = self.executor.submit(request).result()
        if not isinstance(found, Inspected):
            raise RuntimeError(f"{Path(source).name}: {getattr(found, 'message', found)}")
        return found.facts

    def alone(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """What a function of this package's comes to in a process of its own."""
        with self.process(function) as call:
            return call(**arguments)

    @contextmanager
    def process(self, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Calls a function of this package's in one process of its own, which is killed at the end of the block. What
        a generator yields comes call by call."""
        own, its = _FORKED.Pipe()
        other = _FORKED.Process(target=_answer, args=(function, its))
        other.start()
        its.close()

        def call(**arguments: Any) -> Any:
            try:
                own.send(arguments)
                found, error = own.recv()
            except (EOFError, OSError):  # it has ended
                other.join()
                raise RuntimeError(f"{function.__name__} ended with code {other.exitcode}") from None
            if error is not None:
                raise RuntimeError(error)
            return found

        try:
            yield call
        finally:
            other.kill()
            other.join()
            own.close()

    def command(self, *words: str) -> str:
        """What ``autotune`` prints."""
        return run([sys.executable, "-m", "autotune", *words])

    def job(self, source: str, plan: Path, num_steps: int) -> dict[str, float]:
        """Samples per second and peak of a plain script that applies a plan, started as a job is."""
        job = [sys.executable, str(HERE / "plain_job.py"), source, str(num_steps)]
        found: dict[str, float] = json.loads(self.command("run", str(plan), "--", *job).splitlines()[-1])
        return found

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


def _answer(function: Callable[..., Any], asks: Connection) -> None:
    """Call it with what is asked, until it is asked no more: what it returns or yields, or raised."""
    with suppress(EOFError):
        while True:
            arguments = asks.recv()
            try:
                found = function(**arguments)
                for one in found if isinstance(found, Generator) else (found,):
                    asks.send((one, None))
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked
                asks.send((None, f"{type(error).__name__}: {error}"))


def measurement(outcome: Outcome) -> Measurement:
    """
    Raises:
        RuntimeError: the trial did not run to its end.
    """
    if not isinstance(outcome, Measured):
        raise RuntimeError(f"{outcome.kind}: {getattr(outcome, 'message', '')}")
    return outcome.measurement


def run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        RuntimeError: it ended with another code than 0; its last words.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(_ended(done.returncode, done.stderr))
    return done.stdout


def _ended(code: int, said: str) -> str:
    return f"exit {code}: {' | '.join(said.strip().splitlines()[-3:])}"


def handle() -> Any:
    """NVML's, of the card that checks run on.

    Raises:
        Skipped: NVML is not there.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(os.environ["CUDA_VISIBLE_DEVICES"])
    except (ImportError, pynvml.NVMLError) as reason:
        raise Skipped(f"NVML cannot be asked: {reason}") from None


def used_bytes() -> int:
    """The card's used memory, by NVML."""
    import pynvml

    return int(pynvml.nvmlDeviceGetMemoryInfo(handle()).used)
