"""One trial at a time to a card, whichever search it belongs to."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from search_tables import measurement

from autotune.measure import MeasureOptions
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.workers import Lost, Measured, MeasureRequest, Outcome
from autotune.workers import local as claim
from autotune.workers.local import LocalSlot, alone_on, is_any_held
from autotune.workers.pool import SlotPool

HOLD = """
import sys
from autotune.workers import local as claim
from autotune.workers.local import alone_on
with alone_on(sys.argv[1], lambda: False) as waited_for:
    print(waited_for, flush=True)
    sys.stdin.read()
"""
TWICE = """
import sys
from autotune.workers.local import alone_on
for _ in range(2):
    with alone_on(sys.argv[1], lambda: False) as waited_for:
        print(waited_for, flush=True)
        sys.stdin.readline()
"""
REQUEST = MeasureRequest(
    id="1",
    task="model.py",
    device="cuda",
    plan=Plan(settings=Settings(), budget=Budget(device="cuda")),
    options=MeasureOptions(parity_batch=None),
)


@contextmanager
def another_search(device: str, script: str = HOLD) -> Any:
    """A process that has a trial on a device."""
    command = [sys.executable, "-c", script, device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "_LOOK_S", 0.01)


def slot(monkeypatch: pytest.MonkeyPatch, gpu: str, **more: str) -> LocalSlot:
    """Whose trials are measured at once."""
    found = LocalSlot({"CUDA_VISIBLE_DEVICES": gpu, **more}, name=gpu)
    server = SimpleNamespace(run=lambda request: Measured(measurement=measurement(8.0)), is_up=lambda: True)
    monkeypatch.setattr(found, "_server", lambda key: None if found._is_closed else server)
    return found


def test_a_free_card_is_held_at_once_and_given_back() -> None:
    for _ in range(2):
        with alone_on("GPU-a", lambda: False) as waited_for:
            assert waited_for is None


def test_two_cards_are_two() -> None:
    with alone_on("GPU-a", lambda: False), alone_on("GPU-b", lambda: False) as waited_for:
        assert waited_for is None


def told_once_killed(future: Future[Outcome], other: subprocess.Popen[str]) -> str:
    """What a trial that waits for another search's says, which is killed meanwhile."""
    with pytest.raises(TimeoutError):
        future.result(timeout=0.2)
    other.kill()
    outcome = future.result(timeout=10)
    assert isinstance(outcome, Measured)
    (said,) = outcome.measurement.warnings
    return said


@pytest.mark.medium
def test_a_search_waits_for_anothers_trial_and_is_told_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that was killed."""
    with another_search("GPU-c") as other, ThreadPoolExecutor() as threads:
        future = threads.submit(slot(monkeypatch, "GPU-c").run, REQUEST)
        said = told_once_killed(future, other)
    assert said.startswith(f"process {other.pid}, another search, uses the same GPU")


@pytest.mark.medium
def test_who_has_waited_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the other's next trial comes at once."""
    looked, find = threading.Event(), claim._holder
    monkeypatch.setattr(claim, "_holder", lambda device: (find(device), looked.set())[0])

    def wait(other: Any) -> tuple[int | None, bool]:
        with alone_on("GPU-g", lambda: False) as waited_for:
            return waited_for, not select.select([other.stdout], [], [], 0)[0]

    with another_search("GPU-g", TWICE) as other, ThreadPoolExecutor() as threads:
        future = threads.submit(wait, other)
        assert looked.wait(timeout=10)
        other.stdin.write("\n")
        other.stdin.flush()
        try:
            assert future.result(timeout=10) == (other.pid, True)
        finally:
            other.kill()


def test_of_two_free_cards_the_one_that_no_other_search_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a trial would wait for the one that was put last, while the other stands idle."""

    def pool() -> SlotPool:
        slots = [slot(monkeypatch, "GPU-x"), slot(monkeypatch, "GPU-y")]
        return SlotPool(slots, is_used=lambda one: is_any_held(one.environment))  # type: ignore[attr-defined]

    with another_search("GPU-y"), pool() as slots:
        assert [slots.ask(REQUEST).where for _ in range(2)] == ["GPU-x", "GPU-x"]
    with another_search("GPU-x"), pool() as slots:
        assert slots.ask(REQUEST).where == "GPU-y"


def test_a_slot_that_is_closed_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    one = slot(monkeypatch, "GPU-d")
    with alone_on("GPU-d", lambda: False), ThreadPoolExecutor() as threads:
        future = threads.submit(one.run, REQUEST)
        one.close()
        assert future.result(timeout=10) == Lost(message="the slot is closed")


def test_a_trial_on_a_cpu_holds_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone_on("GPU-e", lambda: False):
        outcome = slot(monkeypatch, "GPU-e").run(REQUEST.model_copy(update={"device": "cpu"}))
    assert isinstance(outcome, Measured)
    assert outcome.measurement.warnings == ()


def test_where_the_system_has_no_such_names_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(claim, "_address", lambda gpu: "/nowhere/at/all")
    with alone_on("GPU-f", ended.is_set) as waited_for:
        assert waited_for is None
