"""A made-up task whose every configuration's speed and peak is known by arithmetic, for the search tests."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from sqlalchemy.engine import Engine

from autotune.files import FOLDER
from autotune.measure import Measurement, Parity
from autotune.plan import Peak, Plan, Speed
from autotune.search_spaces import SearchSpace, load_space
from autotune.searches.driver import search
from autotune.searches.events import Event
from autotune.searches.options import SearchOptions
from autotune.searches.requests import reference_settings
from autotune.searches.sampler.configuration_space import ConfigurationSpace, Predict
from autotune.searches.store.exclusive import ExclusiveStorage
from autotune.searches.time_budget import TimeBudget
from autotune.techniques import Device, Facts, Settings
from autotune.techniques.allocator import Allocator
from autotune.techniques.batch import Batch
from autotune.techniques.precision import Precision
from autotune.workers import Outcome, TrialRequest
from autotune.workers.table import Row, TableExecutor

E = TypeVar("E")

MIB = 2**20
FINGERPRINT = "sha256:" + "a" * 64

SPACE_YAML = """
schema: autotune/space@1
batch: auto
precision: auto
checkpointing: [{kind: none}, {kind: blocks, every: 1}, {kind: blocks, every: 2}]
allocator: auto
"""
SPACE = SearchSpace.from_yaml(SPACE_YAML)

SMALL = "schema: autotune/space@1\nprecision: auto\nallocator: auto\n"
"""A space of four configurations, which are these."""
REFERENCE = Settings(batch=Batch(micro=64))
BF16 = REFERENCE.model_copy(update={"precision": Precision(kind="bf16")})
TCMALLOC = REFERENCE.model_copy(update={"allocator": Allocator(kind="tcmalloc")})
BOTH = BF16.model_copy(update={"allocator": Allocator(kind="tcmalloc")})


def facts(**changes: Any) -> Facts:
    """A task of twelve blocks with an effective batch of 64, on a CPU with bfloat16 and tcmalloc."""
    known: dict[str, Any] = {
        "fingerprint": FINGERPRINT,
        "device": Device(type="cpu", name="A CPU", memory_bytes=64 * 2**30, bf16=True),
        "torch_version": "2.13.0",
        "num_threads": 2,
        "host_memory_bytes": 2 * MIB,  # of one process at a time: finalists run in turn, and not by turns
        "num_parameters": 10**6,
        "num_trainable": 10**6,
        "num_blocks": 12,
        "block_name": "Block",
        "conv_dims": (),
        "dataset_length": 10_000,
        "dataset_kind": "map",
        "dataset_bytes": 10**6,
        "dataset_deterministic": True,
        "stackable": True,
        "shapes_vary": False,
        "shards_by_worker": False,
        "loader_options": {},
        "loader_samples_per_s": {0: 1e6},
        "effective_batch": 64,
        "effective_batch_held": True,
        "effective_batch_assumed": False,
        "split_error": 1e-6,
        "allow_split": False,
        "optimizer": "AdamW",
        "optimizer_implementations": ("for_loop", "foreach", "fused"),
        "allocators": ("tcmalloc",),
    }
    return Facts(**{**known, **changes})


def speed(settings: Settings) -> float:
    """Samples per second: 1/time, a sample's time and a micro-batch's overhead."""
    batch = settings.batch or Batch(micro=64)
    per_sample = 0.010 * (0.6 if settings.precision.kind == "bf16" else 1.0)
    if settings.checkpointing.kind == "blocks":
        per_sample *= 1 + 0.33 / settings.checkpointing.every
    if settings.allocator.kind == "tcmalloc":
        per_sample *= 0.95
    return batch.num_samples / (per_sample * batch.num_samples + 0.02 * batch.accumulate)


def peak(settings: Settings) -> int:
    """Bytes: 200 MiB, and 10 MiB of activations for each sample of a micro-batch, less what is recomputed."""
    batch = settings.batch or Batch(micro=64)
    activations = 10 * MIB * batch.micro * (0.6 if settings.precision.kind == "bf16" else 1.0)
    if settings.checkpointing.kind == "blocks":
        activations *= 1 - 0.8 / settings.checkpointing.every
    total = 200 * MIB + activations
    return round(total * (0.85 if settings.allocator.kind == "tcmalloc" else 1.0))


def configurations(known: Facts, space: SearchSpace = SPACE) -> Iterator[Settings]:
    """Every configuration of a space, and the reference."""
    reference = reference_settings(known)
    yield reference
    yield from ConfigurationSpace(space.choices(known), reference, known.num_blocks).shuffled("all")


def table(known: Facts, space: SearchSpace = SPACE) -> list[Row]:
    """A row for each configuration."""
    return [row(settings) for settings in configurations(known, space)]


def row(settings: Settings, **changes: Any) -> Row:
    """A configuration's row by arithmetic, or as ``changes`` say."""
    return Row(settings=settings, **{"samples_per_s": (speed(settings),), "peak_bytes": (peak(settings),), **changes})


def measurement(value: float, half: float = 0.0, disturbed: float = 0.0, process: int = MIB) -> Measurement:
    """One process's, of so many samples per second and half an interval."""
    return Measurement(
        samples_per_s=Speed(value=value, low=value - half, high=value + half),
        peak=Peak(process=process),
        parity=Parity(losses=(1.0,)),
        num_steps=1,
        num_windows=1,
        loader_wait=0.0,
        disturbed=disturbed,
        epoch_start_s=0.0,
        phases_s={},
    )


def every(**changes: Any) -> SearchOptions:
    """As :func:`options`, of a sampler that stops where nothing is left: the default one is sure sooner."""
    return options(sampler="random", **changes)


def is_again(request: TrialRequest) -> bool:
    """Whether it is a finalist's."""
    return request.id.startswith("finalist-")


def is_anchor(request: TrialRequest) -> bool:
    """Whether it is the reference's, that trials are compared with it."""
    return request.id.startswith("anchor-")


@dataclass
class Run:
    """One search over a table, and all that could be seen of it."""

    executor: TableExecutor
    events: list[Event]
    plan: Plan | None = None

    @property
    def measured(self) -> list[Settings]:
        """What was asked for in the search itself, in order."""
        trials = (r for r in self.executor.requests if r.kind == "measure" and not is_again(r) and not is_anchor(r))
        return [r.plan.settings for r in trials]

    @property
    def again(self) -> list[Settings]:
        """What was asked for again once the search had ended, in order."""
        return [r.plan.settings for r in self.executor.requests if r.kind == "measure" and is_again(r)]

    @property
    def fresh(self) -> list[Settings]:
        """What was asked for in fresh interpreters, in order."""
        return [r.plan.settings for r in self.executor.requests if r.kind == "measure" and r.fresh]

    def seen(self, kind: type[E]) -> list[E]:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def run_search(
    options: SearchOptions,
    known: Facts | None = None,
    rows: Iterable[Row] | None = None,
    executor: TableExecutor | None = None,
    stop: threading.Event | None = None,
    predict: Predict = lambda settings: None,
    choose: Any = lambda settings, choices: None,
    observe: Callable[[Event], None] = lambda event: None,
    **rest: Any,
) -> Run:
    """Search a table: all of it unless ``rows`` replace some; in the current directory."""
    known = known or facts()
    space = load_space(options.space)
    replaced = [*table(known, space), *(rows or ())]
    executor = executor or TableExecutor(known, replaced, predict=predict, choose=choose)
    run = Run(executor, [])
    if options.storage is None and not options.resume and not FOLDER.exists():
        FOLDER.mkdir()
        (FOLDER / f"{Path(options.task).stem}.db").write_bytes(empty_database())
    time_budget = TimeBudget(options.trial_time, options.max_time, **rest)

    def seen(event: Event) -> None:
        run.events.append(event)
        observe(event)

    run.plan = search(options, executor, seen, stop or threading.Event(), time_budget)
    return run


class InMemory(optuna.storages.InMemoryStorage):
    """In place of an Optuna storage in a database."""

    class engine:
        """Has no connections."""

        @staticmethod
        def dispose() -> None: ...


@cache
def empty_database() -> bytes:
    """A storage without a study: to make one takes a third of a second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.db"
        ExclusiveStorage(f"sqlite:///{path}").close()
        return path.read_bytes()


def search_until(
    moment: Callable[[object], bool], search: SearchOptions, base: type[TableExecutor] = TableExecutor
) -> None:
    """Search in a forked process that ends itself by SIGKILL before the commit or the trial for which ``moment`` is
    true."""

    def die(about: object) -> None:
        if moment(about):
            os.kill(os.getpid(), signal.SIGKILL)

    class Deadly(base):
        def _answer(self, request: TrialRequest) -> Outcome:
            die(request)
            return super()._answer(request)

    empty_database()  # else its commits count too, in whatever test is the first
    pid = os.fork()
    if pid == 0:
        sqlalchemy.event.listen(Engine, "commit", die)
        run_search(search, executor=Deadly(facts(), [row(settings) for settings in configurations(facts())]))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the search ended before it could be killed"


def options(**changes: Any) -> SearchOptions:
    """The test space (a file in the current directory), ten trials, one sampler seed."""
    space = Path("space.yaml")
    if not space.exists():
        space.write_text(SPACE_YAML)
    return SearchOptions(**{"task": "model.py", "space": "space.yaml", "trials": 10, **changes})


@cache
def small_search(asked: Callable[[], SearchOptions] = options) -> Run:
    """A search of the four configurations from its start to its end, made once for all that only look at it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("space.yaml").write_text(SMALL)
        return run_search(asked())
