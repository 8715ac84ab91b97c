"""A search begins with what earlier searches of its job have measured in this folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from search_tables import MIB, Run, configurations, facts, options, row

from autotune.commands.search import search_on
from autotune.searches.event_base import Event
from autotune.searches.events import TrialEnded, TrialStarted, Warned
from autotune.workers.table import TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory")
ROOMY = facts(host_memory_bytes=2**40)
"""With memory for two processes at once: they take turns."""
TASK = "def build_model(): ...\ndef build_dataset(): ...\ndef compute_loss(model, batch): ...\n"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(TASK)


def search(scale: float = 1.0, **asked: Any) -> Run:
    """On a device that is so many times as fast as the first."""
    rows = [row(one) for one in configurations(ROOMY)]
    rows = [
        each.model_copy(update={"samples_per_s": tuple(scale * one for one in each.samples_per_s)}) for each in rows
    ]
    run = Run(TableExecutor(ROOMY, rows), [])
    run.plan = search_on(options(trials=30, **asked), run.executor, run.events.append, threading.Event())
    return run


def notes(run: Run) -> list[str]:
    return [one.message for one in run.seen(Warned) if "earlier" in one.message or "later" in one.message]


@pytest.mark.medium
def test_at_another_budget_half_of_the_trials_find_the_same_plan():
    """It says what it took over, and the winner is measured by turns with the reference as in any search."""
    first = search(budget=700 * MIB)
    second, anew = search(budget=500 * MIB), search(budget=500 * MIB, fresh=True)
    assert 2 * len(second.measured) <= len(anew.measured)
    assert second.plan.settings == anew.plan.settings
    known = [one for one in second.seen(TrialEnded) if one.is_known]
    assert second.plan.search.known == len(known) > 0
    (note,) = notes(second)
    assert note.startswith(f"{len(known)} measurements of earlier searches of this job are taken over")
    assert notes(first) == notes(anew) == []
    turns = [[each.kind for each in run.executor.requests].count("compare") for run in (second, anew)]
    assert turns[0] == turns[1] > 0


def test_a_task_that_has_changed_is_measured_anew():
    first = search(budget=700 * MIB)
    Path("model.py").write_text(f"{TASK}WIDTH = 2\n")
    second = search(budget=700 * MIB)
    assert len(second.measured) == len(first.measured)


def test_a_device_that_no_longer_gives_the_same_is_measured_anew():
    """It is twice as fast by now: the one that was measured again says so."""
    first = search(budget=700 * MIB)
    second = search(scale=2.0, budget=700 * MIB)
    assert second.plan.search.known is None
    assert len([one for one in second.measured if one in first.measured]) >= 2
    (note,) = notes(second)
    assert "earlier measurements of this task are left alone" in note


@pytest.mark.parametrize("content", [b"no database", b""])
def test_a_store_that_cannot_be_read_is_told_and_ends_no_search(content):
    """An empty file is a database without tables."""
    Path(".autotune").mkdir()
    Path(".autotune/results.db").write_bytes(content)
    run = search(budget=700 * MIB)
    assert run.plan is not None
    said = notes(run)
    assert [note.startswith("what is measured is not kept for later searches: ") for note in said] == [True] * len(said)
    assert bool(said) == bool(content)


@pytest.mark.medium
def test_a_store_that_vanishes_under_a_search_is_told_once_and_ends_no_search():
    """Where the working folder goes, it goes too: the trials tell that, and the study lies elsewhere."""
    rows = [row(one) for one in configurations(ROOMY)]
    run = Run(TableExecutor(ROOMY, rows), [])

    def observe(event: Event) -> None:
        run.events.append(event)
        if isinstance(event, TrialStarted):
            Path(".autotune/results.db").unlink(missing_ok=True)

    run.plan = search_on(options(trials=30, budget=700 * MIB), run.executor, observe, threading.Event())
    (note,) = notes(run)
    assert note.startswith("what is measured is not kept for later searches")


@pytest.mark.medium
def test_what_is_over_a_small_budget_is_known_at_a_large_one():
    """Trials of a smaller budget say what fits a larger one: the second search tries what the first left out."""
    search(budget=500 * MIB)
    second, anew = search(budget=900 * MIB), search(budget=900 * MIB, fresh=True)
    assert second.plan.settings == anew.plan.settings


def test_a_search_that_is_gone_on_with_takes_over_nothing_twice():
    """Its own trials are in its study."""
    first = search(budget=700 * MIB)
    again = search(budget=700 * MIB, resume=True)
    assert again.plan.settings == first.plan.settings
    assert again.measured == []
    assert notes(again) == []
