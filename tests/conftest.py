"""What tests share."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended, run_here
from full_disk import mounted
from gloo_pair import found_by_two
from search_tables import SMALL, InMemory, empty_database

from autotune.measure.timing.disturbance import one_thread
from autotune.testing.executors import ExecutorContract
from autotune.workers import Executor
from autotune.workers.local import LocalSlot
from autotune.workers.pool import SlotPool


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``-m alone`` imports the files alone that have such tests; to import all takes many seconds."""
    if config.option.markexpr != "alone" or collection_path.suffix != ".py":
        return None
    return "pytest.mark.alone" not in collection_path.read_text(encoding="utf-8") or None


_SLOW = {
    "test_a_fresh_trial_starts_as_a_job_would",
    "test_close_ends_every_process_at_once",
    "test_nothing_outlives_a_driver_that_was_killed",
    "test_of_two_that_take_turns_one_computes_at_a_time",
    "test_of_two_that_take_turns_one_that_fails_as_it_starts_leaves_no_turn",
    "test_of_two_that_take_turns_one_that_is_killed_leaves_the_other_measured",
    "test_what_the_environment_does_is_lost_and_the_next_trial_runs",
}
"""Of an executor's contract, which is not only ours: marks of this suite are not registered elsewhere."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs Ray comes first, so that one of two workers gets it all, and one cluster is started. Whatever starts
    processes by an executor's contract is not for `make check`."""
    for item in items:
        if getattr(item, "originalname", item.name) in _SLOW:
            item.add_marker("slow")
        elif issubclass(getattr(item, "cls", None) or object, ExecutorContract):
            item.add_marker("medium")
    items.sort(key=lambda item: "ray_executor" not in f"{getattr(item, 'fixturenames', ())} {item.name}")


@pytest.fixture(scope="session")
def local_executor() -> Iterator[Executor]:
    """As a ``LocalExecutor``, one for the session: its fork servers import torch once. They start in this folder, in
    whichever a test is by then."""
    with SlotPool([LocalSlot(dict(os.environ), os.getcwd())]) as executor:
        yield executor


@pytest.fixture(scope="session")
def ray_executor() -> Iterator[Executor]:
    """One Ray cluster for the session: it takes seconds to start."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from autotune.workers.cluster import RayExecutor

    with RayExecutor() as executor:
        yield executor


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found that ran the test's file."""
    return found_by_two(request.module.__file__, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def one_thread_only() -> Iterator[None]:
    """Sums have one order, and are the same to the last bit."""
    with one_thread():
        yield


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_space(elsewhere: None) -> None:
    """In a folder with a space of four configurations."""
    Path("space.yaml").write_text(SMALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the tasks, and a small space of batches."""
    for task in Path(__file__).with_name("tasks").glob("*.py"):
        shutil.copy(task, tmp_path)
    (tmp_path / "space.yaml").write_text("schema: autotune/space@1\nbatch: auto\n")
    return tmp_path


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a small disk of its own."""
    with mounted(tmp_path_factory.mktemp("disk")) as path:
        yield path


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, InMemory]:
    """Studies are in no file, which takes a quarter of the time: for tests of what a search does, and not of what it
    keeps. By their URLs."""
    empty_database()  # is kept for the session: made by a real storage
    storages: defaultdict[str, InMemory] = defaultdict(InMemory)
    monkeypatch.setattr("autotune.searches.store.exclusive.open_storage", lambda url: storages[url])
    return storages


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches in this process measure their finalists once in fresh interpreters, and ``verify`` its plan: how often
    they must be is shown over tables."""
    monkeypatch.setattr("autotune.searches.winner.finalists.MOST_ROUNDS", 1)
    monkeypatch.setattr("autotune.commands.verify.NUM_REPEATS", 1)


@pytest.fixture
def here(
    local_executor: Executor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """``command_line.autotune`` without a process of its own: ``here(*arguments, cwd=folder, **variables)``."""

    def run(*arguments: object, **options: object) -> Ended:
        with monkeypatch.context() as patch:
            return run_here(local_executor, patch, capsys, *arguments, **options)

    return run
