"""The reference is measured again between trials, and each trial is compared with a neighbour in time."""

from __future__ import annotations

import math

import pytest
from search_tables import (
    BF16,
    BOTH,
    REFERENCE,
    TCMALLOC,
    Run,
    every,
    facts,
    is_again,
    is_anchor,
    row,
    run_search,
    small_search,
    speed,
)

from autotune.plan import Speed
from autotune.searches.events import AnchorEnded, TrialEnded
from autotune.searches.options import SearchOptions
from autotune.searches.store.pace import UNCORRECTED, Anchor, correction, is_due
from autotune.workers import Measured, OutOfMemory
from autotune.workers.table import Row, TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory", "small_space")

CALM = Anchor(0, math.log(100.0), 0.03, 0.0)
"""The reference's own trial, at 100 samples per second."""


class Busy(TableExecutor):
    """Other work takes ``taken`` of all speeds from the ``after``-th measurement on; the trials see it."""

    def __init__(self, after: int, taken: float, rows: list[Row] | None = None) -> None:
        rows = rows or [row(settings) for settings in (REFERENCE, BF16, TCMALLOC, BOTH)]
        super().__init__(facts(), rows)
        self.after, self.taken = after, taken

    def _answer(self, request):
        outcome = super()._answer(request)
        num_measured = sum(one.kind == "measure" for one in self.requests)
        if not isinstance(outcome, Measured) or num_measured <= self.after:
            return outcome
        value = outcome.measurement.samples_per_s.value * (1 - self.taken)
        seen = {"samples_per_s": Speed(value=value, low=value, high=value), "disturbed": self.taken}
        return outcome.model_copy(update={"measurement": outcome.measurement.model_copy(update=seen)})


def anchors(run: Run) -> list[str]:
    return [request.id for request in run.executor.requests if request.kind == "measure" and is_anchor(request)]


def test_a_quiet_machine_needs_an_anchor_every_fifth_trial_alone():
    assert anchors(small_search(every)) == []
    assert [number for number in range(1, 12) if is_due(number, 0.0, CALM)] == list(range(5, 12))
    assert not is_due(9, 0.0, Anchor(6, 0.0, 0.03, 0.0))
    assert is_due(10, 0.0, Anchor(6, 0.0, 0.03, 0.0))


def test_other_work_that_begins_changes_or_ends_calls_for_an_anchor_at_once():
    busy = Anchor(2, 0.0, 0.03, 0.5)
    assert is_due(1, 0.4, CALM)
    assert is_due(2, 0.7, busy)
    assert is_due(2, 0.0, busy)
    assert [is_due(number, 0.5, busy) for number in (2, 3)] == [False, True]


def test_anchors_that_agree_within_their_errors_correct_nothing():
    assert correction(3, 0.0, [CALM, Anchor(5, math.log(95.0), 0.03, 0.0)]) == UNCORRECTED


def test_a_trial_is_corrected_by_the_anchor_that_was_disturbed_as_it_was():
    """Other work began before the third trial of five, and takes half."""
    after = [CALM, Anchor(5, math.log(50.0), 0.03, 0.5)]
    assert correction(1, 0.0, after) == UNCORRECTED
    assert correction(3, 0.5, after).shift == pytest.approx(math.log(2))


def test_a_change_that_no_trial_saw_is_taken_in_proportion_and_is_unsure():
    """The second of four trials between anchors at 100 and 50: three eighths of the change have gone by."""
    found = correction(1, 0.0, [Anchor(0, math.log(100), 0.03, 0.0), Anchor(4, math.log(50), 0.03, 0.0)])
    assert found.shift == pytest.approx(0.375 * math.log(2))
    assert not found.is_sure


def test_what_other_work_took_widens_the_error_the_more_the_less_of_it_the_anchors_met():
    met, unmet = (correction(1, 0.7, [CALM, Anchor(2, math.log(40), 0.03, seen)]) for seen in (0.7, 0.1))
    assert 0.03 < met.error < unmet.error
    assert not correction(1, 0.7, [CALM]).is_sure


def search(executor: TableExecutor, asked: SearchOptions | None = None) -> Run:
    return run_search(asked or every(), executor=executor)


def test_a_trial_under_load_is_not_compared_by_its_raw_speed():
    """Other work takes half from the third measurement on: what the trial before it did, 102 or 158 samples/s, is more
    than both settings together at 83. All are ranked as on a quiet machine."""
    run = search(Busy(2, 0.5))
    assert anchors(run)
    assert run.plan.settings == BOTH
    assert [settings for settings in run.again if settings != REFERENCE][:2] == [BOTH, BF16]


def test_a_plan_states_the_speeds_that_were_measured_and_no_corrected_one():
    run = search(Busy(2, 0.5))
    assert run.plan.measured.samples_per_s.value == pytest.approx(speed(BOTH) / 2, rel=1e-4)


def test_an_anchor_compares_no_losses_evaluates_nothing_and_is_no_trial():
    run = search(Busy(2, 0.5))
    request = next(one for one in run.executor.requests if is_anchor(one))
    assert request.plan.settings == REFERENCE
    assert (request.options.parity_batch, request.options.evaluation, request.fresh) == (None, None, False)
    assert request.options.trial_time_s == 15.0
    assert run.plan.search.trials == 4


def test_an_anchor_is_told_with_the_pace_that_it_shows():
    (told, *_) = search(Busy(2, 0.5)).seen(AnchorEnded)
    assert told.shift == pytest.approx(math.log(2), abs=0.01)


def test_where_the_reference_fits_nowhere_the_first_trial_that_was_measured_is_the_anchor():
    out = row(REFERENCE, outcome=OutOfMemory(peak_bytes=10**9, message="the kernel ended it"))
    run = search(Busy(2, 0.5, [out, row(BF16), row(TCMALLOC), row(BOTH)]))
    number, settings = next((one.number, one.settings) for one in run.seen(TrialEnded) if one.number)
    again = [request.plan.settings for request in run.executor.requests if is_anchor(request)]
    assert again == [settings] * len(again) != []
    (told, *_) = run.seen(AnchorEnded)
    assert (told.number, told.settings) == (number, settings)
    assert told.shift == pytest.approx(math.log(2), abs=0.01)


def test_anchors_are_kept_and_a_resumed_search_ranks_trials_as_the_first_did():
    first = search(Busy(2, 0.5), every(storage="sqlite:///study.db"))
    again = search(Busy(0, 0.5), every(storage="sqlite:///study.db", resume=True))
    assert [request for request in again.executor.requests if request.kind == "measure"] == []
    assert again.plan.settings == first.plan.settings


def test_trials_that_run_beside_others_have_no_anchors():
    executor = Busy(2, 0.5)
    executor.num_slots = 2
    assert anchors(search(executor)) == []


def test_what_other_work_disturbed_too_much_does_not_win_by_its_trial_alone():
    """Both settings together say 500 samples/s with 90 % of their time gone, and the time is over when they are
    measured again, disturbed as before."""
    wild = row(BOTH, samples_per_s=(500.0,), peak_bytes=(1,), disturbed=(0.9,))
    now = [0.0]

    class Late(TableExecutor):
        def _answer(self, request):
            now[0] = 1e6 if is_again(request) else 0.0
            return super()._answer(request)

    executor = Late(facts(), [row(REFERENCE), row(BF16), row(TCMALLOC), wild])
    run = run_search(every(max_time=1e5), executor=executor, clock=lambda: now[0])
    assert run.again == [BOTH]
    assert run.plan.settings == BF16
    assert [event.is_sure for event in run.seen(TrialEnded) if event.settings == BOTH] == [False]
