"""Where a search's seconds go: by hand, and of whole searches on a clock that their trials move."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from screen import printed
from search_tables import configurations, facts, measurement, options, row, run_search

from autotune.errors import OutOfTime
from autotune.report.tables import spent_table
from autotune.searches.events import Event, SecondsKnown
from autotune.searches.seconds import Seconds
from autotune.workers import Compared, Measured, Outcome, OutOfMemory, Predicted, TrialRequest
from autotune.workers.table import TableExecutor

pytestmark = pytest.mark.usefixtures("small_space")


def measured(seconds: float, **phases_s: float) -> Measured:
    return Measured(measurement=measurement(100.0).model_copy(update={"phases_s": phases_s}), seconds=seconds)


def test_each_outcome_counts_by_what_it_was_asked_for_and_by_its_phases():
    seconds = Seconds(started_s=1.5, read_s=4.0)
    for name, outcome in (
        ("trial-000", measured(10.0, load=2.0, timed=5.0)),
        ("predict-1", Predicted(predictions=(), seconds=6.0)),
        ("trial-001", measured(7.0, load=1.0, timed=5.0)),
        ("trial-002", OutOfMemory(message="the watchdog", peak_bytes=1, seconds=3.0)),
        ("anchor-003", measured(2.0, timed=1.0)),
        ("without-batch-round-1", measured(5.0, timed=1.0)),
    ):
        seconds.learn(name, outcome)
    assert seconds.spent(elapsed_s=40.0) == {
        "starting": {"beside": 1.5},
        "reading": {"beside": 4.0},
        "reference": {"load": 2.0, "timed": 5.0, "beside": 3.0},
        "predicting": {"beside": 6.0},
        "trials": {"load": 1.0, "timed": 5.0, "beside": 4.0},
        "anchors": {"timed": 1.0, "beside": 1.0},
        "ablation": {"timed": 1.0, "beside": 4.0},
        "between runs": {"beside": 1.5},
    }


def test_of_a_round_by_turns_both_sides_turns_count_and_the_longer_start():
    """Both start at once, so that of 3 and 4 seconds of loading 4 have passed."""
    one, other = measured(20.0, load=3.0, timed=8.0), measured(18.0, load=4.0, timed=7.0)
    seconds = Seconds(started_s=0.0, read_s=0.0)
    seconds.learn("finalist-001-round-1", Compared(one=one, other=other, turns=(), seconds=25.0))
    assert seconds.spent(25.0) == {"finalists": {"load": 4.0, "timed": 15.0, "beside": 6.0}}


def test_what_earlier_processes_spent_is_added_to():
    seconds = Seconds(started_s=0.0, read_s=4.0, earlier={"reading": {"beside": 5.0}, "trials": {"timed": 30.0}})
    seconds.learn("trial-004", measured(6.0, timed=6.0))
    assert seconds.spent(10.0) == {"reading": {"beside": 9.0}, "trials": {"timed": 36.0}}


class Clocked(TableExecutor):
    """Each process takes two seconds, and as long again passes until the next."""

    def __init__(self) -> None:
        super().__init__(facts(), [row(settings) for settings in configurations(facts())])
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def _answer(self, request: TrialRequest) -> Outcome:
        self.now += 4.0
        return super()._answer(request).model_copy(update={"seconds": 2.0})


def searched(**changes) -> tuple[SecondsKnown, float]:
    """What a search tells last, and its seconds by the clock."""
    executor, seen = Clocked(), list[Event]()
    with contextlib.suppress(OutOfTime):
        run_search(options(**changes), executor=executor, clock=executor.clock, observe=seen.append)
    assert isinstance(seen[-1], SecondsKnown)
    return seen[-1], executor.now


def total(known: SecondsKnown) -> float:
    return sum(sum(phases.values()) for phases in known.spent.values())


@pytest.mark.usefixtures("in_memory")
@pytest.mark.parametrize("changes", [{}, {"max_time": 10.0}], ids=["with a plan", "without"])
def test_a_search_tells_last_where_all_of_its_seconds_went(changes):
    known, elapsed_s = searched(**changes)
    assert Path("plan.yaml").exists() == (not changes)
    assert total(known) == pytest.approx(elapsed_s)
    assert {"starting", "reading", "reference", "between runs"} <= set(known.spent)


@pytest.mark.medium
def test_resume_adds_to_what_the_study_keeps():
    first, first_s = searched(trials=2)
    again, again_s = searched(trials=4, resume=True)
    assert total(again) == pytest.approx(first_s + again_s)
    assert sum(again.spent["reading"].values()) == 2 * sum(first.spent["reading"].values())
    assert again.spent["reference"] == first.spent["reference"]


SPENT = {"reading": {"beside": 16.0}, "trials": {"load": 40.25, "timed": 60.0, "beside": 27.0}}


def test_the_table_has_a_row_for_what_was_done_with_its_phases():
    said = [text.strip() for text in printed(spent_table(SPENT), 100).splitlines()]
    assert said == [
        "Where 2 min 23 s went",
        "reading  16 s",
        "trials   2 min 07 s: load 40.2 s, timed 60.0 s, beside 27.0 s",
    ]
