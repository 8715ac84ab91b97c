"""Trials know the speed to beat: what is surely slower ends before its losses are compared, and wins only after."""

from __future__ import annotations

import pytest
from search_tables import (
    BF16,
    BOTH,
    MIB,
    REFERENCE,
    configurations,
    every,
    facts,
    is_again,
    row,
    run_search,
    speed,
)

from autotune.measure import Parity
from autotune.searches.events import TrialEnded
from autotune.workers import Measured
from autotune.workers.table import TableExecutor

pytestmark = pytest.mark.usefixtures("in_memory", "small_space")


def trials(run):
    return [request for request in run.executor.requests if request.kind == "measure" and not is_again(request)]


def test_a_trial_is_to_beat_the_fastest_before_it():
    """The reference has nothing to beat; the first trial has the reference; each later one the fastest by then."""
    run = run_search(every())
    fastest: list[float] = []
    for request in trials(run):
        assert request.options.to_beat == (pytest.approx(max(fastest)) if fastest else None)
        fastest.append(speed(request.plan.settings))


def test_what_is_measured_again_has_nothing_to_beat():
    """Finalists, and the reference beside them."""
    run = run_search(every())
    again = [request for request in run.executor.requests if request.kind == "measure" and is_again(request)]
    assert again
    assert {request.options.to_beat for request in again} == {None}


def test_what_lost_wins_only_after_its_losses_were_compared():
    """Everything is slower than BOTH, which needs all of the budget in its second repeat; bf16 is next, and was not
    compared where it was tried after BOTH."""
    limit = 700 * MIB
    agrees = Parity(losses=(1.0,), compared="losses")
    rows = [row(one, parity=agrees) for one in configurations(facts()) if one != BOTH]
    falls = row(BOTH, samples_per_s=(2000.0,) * 3, peak_bytes=(MIB, MIB, limit))
    run = run_search(every(budget=limit), executor=TableExecutor(facts(), [*rows, falls]))
    plan = run.plan.settings
    assert plan != BOTH
    tried = next(event for event in run.seen(TrialEnded) if event.settings == plan)
    assert isinstance(tried.outcome, Measured)
    compared = [
        request
        for request in run.executor.requests
        if request.kind == "measure" and request.plan.settings == plan and request.options.parity_batch is not None
    ]
    assert len(compared) == (1 if tried.outcome.measurement.parity.losses else 2)
    assert not compared[-1].fresh
    assert run.plan.checked == "losses"


def test_what_strays_once_it_is_compared_is_not_the_plan():
    """Of a search in which each configuration but the fastest two strays; the fastest falls, and the next in speed had
    not been compared."""
    limit = 700 * MIB
    strays = Parity(losses=(1.0,), deviation=1.0, strayed_at=1, compared="losses")
    falls = row(BOTH, samples_per_s=(2000.0,) * 3, peak_bytes=(MIB, MIB, limit))
    rows = [row(one, parity=strays) for one in configurations(facts()) if one not in (BOTH, REFERENCE, BF16)]
    own = [row(REFERENCE), row(BF16, samples_per_s=(1.0,)), falls]
    run = run_search(every(budget=limit), executor=TableExecutor(facts(), [*rows, *own]))
    assert run.plan.settings in (REFERENCE, BF16)
