"""``--max-time`` bounds everything: by a clock that the trials themselves move."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable

import pytest
from search_tables import configurations, facts, is_again, is_anchor, measurement, options, row, run_search, speed

from autotune.errors import OutOfTime, TaskError
from autotune.measure.measurement import Quality
from autotune.searches.driver import search
from autotune.searches.events import Event, Stopped, TrialEnded, Warned
from autotune.searches.requests import reference_settings
from autotune.searches.time_budget import LEAST_SHARE_S, NUM_REPEATS, TimeBudget
from autotune.techniques import Facts
from autotune.workers import Compared, Measured, Outcome, TimedOut, TrialRequest
from autotune.workers.table import Row, TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory", "elsewhere")


class Clocked(TableExecutor):
    """Every trial takes its time share and an overhead, twice that where it is fresh; what hangs, its deadline."""

    def __init__(self, known: Facts, overhead_s: float, hangs: bool = False, rows: Iterable[Row] = ()) -> None:
        super().__init__(known, [*(row(settings) for settings in configurations(known)), *rows])
        self.now, self.overhead_s, self.hangs = 0.0, overhead_s, hangs
        self.asked: Callable[[TrialRequest], None] = lambda request: None

    def clock(self) -> float:
        return self.now

    def _answer(self, request: TrialRequest) -> Outcome:
        outcome = super()._answer(request)
        if request.kind == "measure":
            self.asked(request)
        if not isinstance(outcome, Measured) or request.kind != "measure":
            self.now += self.overhead_s
            return outcome
        if self.hangs and not is_again(request) and len(self.requests) > 3:  # inspected, predicted, the reference
            self.now += request.deadline_s
            return TimedOut(deadline_s=request.deadline_s)
        share = request.options.trial_time_s
        seconds = self.overhead_s * (2 if request.fresh else 1) + share
        self.now += seconds
        measurement = outcome.measurement.model_copy(update={"phases_s": {"timed": share}})
        return outcome.model_copy(update={"measurement": measurement, "seconds": seconds})


@pytest.mark.parametrize(("max_time_s", "overhead_s"), [(60.0, 0.5), (90.0, 2.0), (600.0, 5.0), (45.0, 3.0)])
def test_a_search_ends_within_its_time_with_a_plan(max_time_s: float, overhead_s: float):
    executor = Clocked(facts(), overhead_s)
    run = run_search(options(max_time=max_time_s, trials=24), executor=executor, clock=executor.clock)
    assert executor.now <= max_time_s
    assert run.plan.measured.samples_per_s.repeats >= 1
    assert run.plan.search.seconds == round(executor.now, 1)


def test_with_time_enough_all_trials_and_all_repeats_are_had():
    executor = Clocked(facts(), 0.5)
    run = run_search(options(max_time=90.0, trials=12, sampler="tpe"), executor=executor, clock=executor.clock)
    assert len(run.measured) == 12
    assert run.plan.measured.samples_per_s.repeats == 2
    assert not any("the time was used up" in note for note in run.plan.notes)


def test_time_is_given_to_the_trials_evenly_and_used():
    executor = Clocked(facts(), 0.5)
    run_search(options(max_time=120.0, trials=12), executor=executor, clock=executor.clock)
    trials = (r for r in executor.requests if r.kind == "measure" and not is_again(r) and not is_anchor(r))
    shares = [request.options.trial_time_s for request in trials]
    assert max(shares[1:]) <= 2 * min(shares[1:])
    assert executor.now > 80.0  # its finalists were sure before their part of the time was over


def test_when_time_runs_out_it_is_the_reason_and_fewer_repeats_are_noted():
    executor = Clocked(facts(), 4.0)
    run = run_search(options(max_time=45.0, trials=24), executor=executor, clock=executor.clock)
    assert run.seen(Stopped) == [Stopped("the time was used up")]
    assert run.plan.measured.samples_per_s.repeats < 2
    assert any("the time was used up" in note for note in run.plan.notes)


def test_hanging_configurations_do_not_eat_the_finalists_time():
    executor = Clocked(facts(), 0.5, hangs=True)
    run = run_search(options(max_time=60.0), executor=executor, clock=executor.clock)
    assert executor.now <= 60.0
    assert run.plan.gain.speed == 1.0


def test_a_reference_that_hangs_ends_with_the_time():
    class Hangs(Clocked):
        def _answer(self, request: TrialRequest) -> Outcome:
            if request.kind != "measure":
                return super()._answer(request)
            self.now += request.deadline_s
            return TimedOut(deadline_s=request.deadline_s, message="in model.py line 3")

    executor = Hangs(facts(), 0.5)
    with pytest.raises(TaskError, match=r"within the \d+ s that --max-time leaves for it\..* in model.py line 3"):
        run_search(options(max_time=20.0), executor=executor, clock=executor.clock)
    assert executor.now <= 20.0


def test_without_a_limit_every_trial_gets_its_share_and_a_generous_deadline():
    executor = Clocked(facts(), 4.0)
    run_search(options(trial_time=5.0, trials=3), executor=executor, clock=executor.clock)
    measured = [request for request in executor.requests if request.kind == "measure"]
    assert {request.options.trial_time_s for request in measured} == {5.0}
    assert measured[0].deadline_s == 605.0
    assert measured[1].deadline_s == 65.0
    assert {request.compiling_s for request in measured} == {600.0}


def test_compiling_has_time_of_its_own_within_max_time():
    """Of 100 s, all that the deadline leaves, but for what is spared for the finalists."""
    executor, ends = Clocked(facts(), 4.0), []
    executor.asked = lambda request: ends.append(executor.now + request.latest_s)
    run_search(options(max_time=100.0, trials=3), executor=executor, clock=executor.clock)
    assert ends[0] == 100.0
    assert max(ends) <= 100.0


def test_a_slow_reference_makes_later_deadlines_longer():
    executor = Clocked(facts(), 50.0)
    run_search(options(trial_time=5.0, trials=2), executor=executor, clock=executor.clock)
    assert [r.deadline_s for r in executor.requests if r.kind == "measure"][1] == 505.0


@pytest.mark.parametrize("trial_time_s", [1.5, 2.0, 10.0])
def test_what_is_spared_for_the_finalists_is_enough_to_compare_them(trial_time_s):
    """A trial may end a second late."""
    now = 0.0
    time_budget = TimeBudget(trial_time_s, 300.0, lambda: now)
    now = 300.0 - time_budget._reserve_s() + min(1.0, trial_time_s - LEAST_SHARE_S)
    assert time_budget.finalist_runs(3, 1) == (3, NUM_REPEATS)
    for num_compared, num_fresh in ((3, 6), (1, 6), (0, 6)):
        assert time_budget.finalist_share_s(num_compared, num_fresh) >= LEAST_SHARE_S


def test_without_time_to_compare_the_fastest_of_the_search_is_repeated_the_reference_too():
    reference = reference_settings(facts())
    slow = [row(s, samples_per_s=(0.99 * speed(reference),)) for s in configurations(facts()) if s != reference]
    executor = Clocked(facts(), 3.0, rows=slow)
    run = run_search(options(max_time=45.0), executor=executor, clock=executor.clock)
    assert reference in run.again
    assert len(set(run.again)) == 2


def test_where_all_others_are_surely_slower_the_job_as_it_stands_alone_is_repeated():
    """Their losses were not compared, and what is slower than the job is not worth it."""
    reference = reference_settings(facts())
    slow = [row(s, samples_per_s=(1.0,)) for s in configurations(facts()) if s != reference]
    run = run_search(options(), executor=Clocked(facts(), 3.0, rows=slow))
    assert set(run.again) == {reference}
    assert run.plan.settings == reference


def test_too_little_time_is_refused_right_after_the_reference():
    """Nothing is said of predictions that there is no time for, or of trials that have ended: none had begun."""
    executor = Clocked(facts(), 20.0)
    events: list[Event] = []
    time_budget = TimeBudget(60.0, 60.0, executor.clock)
    with pytest.raises(OutOfTime, match=r"left no time .* One trial needs about --max-time \d+s"):
        search(options(max_time=60.0), executor, events.append, threading.Event(), time_budget)
    assert isinstance(events[-2], TrialEnded)  # the last tells where the time went
    assert events[-2].number == 0


class SlowToRead(Clocked):
    """Each process that inspects or predicts imports for so long before it answers."""

    def __init__(self, read_s: float) -> None:
        super().__init__(facts(), 0.5)
        self.read_s = read_s

    def _answer(self, request: TrialRequest) -> Outcome:
        outcome = super()._answer(request)
        if request.kind == "measure":
            return outcome
        self.now += self.read_s
        return outcome.model_copy(update={"seconds": self.read_s})

    def predictions(self) -> list[TrialRequest]:
        return [request for request in self.requests if request.kind == "predict"]


def test_the_time_of_predictions_begins_once_the_task_was_read():
    """A tenth of the time went to importing transformers, and the second request had what was left of it."""
    executor = SlowToRead(8.0)
    run_search(options(max_time=100.0), executor=executor, clock=executor.clock)
    first, second = executor.predictions()
    assert first.options.most_s == pytest.approx(10.0)
    assert second.options.most_s == pytest.approx(9.5)  # less what the first took beside its reading
    assert first.deadline_s >= 8.0 + first.options.most_s
    assert executor.now <= 100.0


def test_what_would_be_cut_off_before_it_is_read_is_not_asked_for_and_that_is_said():
    executor = SlowToRead(8.0)
    run = run_search(options(max_time=40.0), executor=executor, clock=executor.clock)
    assert executor.predictions() == []
    (said,) = [event.message for event in run.seen(Warned) if "predicted" in event.message]
    assert said.startswith("memory is not predicted: reading the task takes 8 s, and --max-time leaves no time for it")
    assert executor.now <= 40.0


def test_the_references_quality_is_no_part_of_what_another_trial_takes():
    """70 s, of which 2 were timed and 60 its recovery: others take 9 s with a second of windows, and there is time for
    9 of them in the two thirds of 130 s that finalists leave. One hangs after ten times 68 s."""
    quality = Quality(value=0.9, error=0.0, seconds=60.0)
    judged = measurement(1.0).model_copy(update={"phases_s": {"timed": 2.0}, "quality": quality})
    for max_time_s, most, deadline_s in ((130.0, 9, 130.0), (None, sys.maxsize, 682.0)):
        time_budget = TimeBudget(trial_time_s=2.0, max_time_s=max_time_s, clock=lambda: 0.0)
        time_budget.learn(Measured(measurement=judged, seconds=70.0), fresh=False)
        assert time_budget.most_trials() == most
        assert time_budget.deadline_s(2.0, spare_finalists=False) == deadline_s


def test_turns_have_what_the_runs_that_are_left_need_not_to_start():
    """A round of 25 s, 15 of them turns: 5 s for each to start. Of 100 s, four runs start in 20, and two have half of
    the other 80; where nothing is left, they have the least."""
    side = measurement(1.0).model_copy(update={"phases_s": {"timed": 7.5}})
    sides = Measured(measurement=side, seconds=20.0)
    found = []
    for max_time_s in (100.0, 20.0, None):
        time_budget = TimeBudget(trial_time_s=2.0, max_time_s=max_time_s, clock=lambda: 0.0)
        time_budget.learn(Compared(one=sides, other=sides, turns=(), seconds=25.0), fresh=True)
        found.append(time_budget.turns_s(4))
    assert found == [40.0, 2 * LEAST_SHARE_S, math.inf]
