"""How long a search likely takes: by hand, from counts and costs."""

from __future__ import annotations

import pytest
from search_tables import facts

from autotune.search.duration import Costs, Runs, expected, likely_s, likely_trials
from autotune.search.options import SearchOptions

COSTS = Costs(trial_s=10.0, again_s=6.0, fresh_s=8.0)


def test_runs_take_what_their_like_have_taken():
    assert likely_s(Runs(trials=8, compared=3, fresh=6), COSTS) == 8 * 10 + 3 * 6 + 6 * 8


def test_trials_share_the_devices_and_finalists_do_not():
    assert likely_s(Runs(trials=8, compared=3, fresh=6), COSTS, num_slots=4) == 2 * 10 + 3 * 6 + 6 * 8


@pytest.mark.parametrize(
    ("most", "sampler", "num_done", "left"),
    [
        (24, "gain", 0, 11),  # it stops by itself
        (24, "gain", 4, 7),
        (24, "gain", 15, 2),  # it has gone on for longer than is usual
        (24, "gain", 24, 0),
        (8, "gain", 0, 8),
        (8, "gain", 7, 1),
        (24, "tpe", 0, 24),  # Optuna's samplers use all
        (24, "tpe", 20, 4),
    ],
)
def test_the_default_sampler_likely_stops_before_it_has_to(most, sampler, num_done, left):
    assert likely_trials(most, sampler, num_done) == left


# A step of 64 samples takes 1.3 * 64 / 83.2 = 1 s, the inspection 5 s: setting up takes (5 - 3) / 2 = 1 s.
KNOWN = facts(step_samples_per_s=83.2)


def test_a_search_that_has_not_begun_is_between_quick_trials_and_slow_ones():
    """Predictions take one to three times as long as the inspection. There are 11 trials, 3 compared, 6 fresh runs. A
    run takes 1 s to be set up, and at the reference's speed 5 steps to warm up and 40 windows of one, 10 more steps
    where its losses are compared; twice as fast, and 10 windows."""
    found = expected(KNOWN, 5.0, SearchOptions("model.py", trial_time_s=60.0), 24)
    slow, quick = 1 + 5 + 40, 1 + 2.5 + 5
    assert found.high_s == pytest.approx(5 + 15 + 11 * (slow + 10) + 3 * slow + 6 * (slow + 3))
    assert found.low_s == pytest.approx(5 + 5 + 11 * (quick + 5) + 3 * quick + 6 * (quick + 3))


def test_at_most_it_is_all_trials_each_for_all_of_its_time_at_half_the_speed():
    found = expected(KNOWN, 5.0, SearchOptions("model.py", trial_time_s=60.0), 24)
    slowest = 1 + 10 + 60
    assert found.most_s == pytest.approx(5 + 15 + 24 * (slowest + 20) + 3 * slowest + 6 * (slowest + 3))


def test_no_estimate_is_longer_than_the_time_that_was_given():
    found = expected(KNOWN, 5.0, SearchOptions("model.py", max_time_s=50.0), 24)
    assert (found.low_s, found.high_s, found.most_s) == (50.0, 50.0, 50.0)


def test_a_space_of_one_measures_it_and_repeats_it():
    """Nothing is compared, and the reference is the winner: three fresh runs."""
    found = expected(KNOWN, 5.0, SearchOptions("model.py", trial_time_s=2.0, sampler="random"), 1)
    assert found.high_s == pytest.approx(5 + (1 + 5 + 2 + 10) + 3 * (1 + 5 + 2 + 3))
