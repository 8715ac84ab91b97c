"""What is believed of configurations: chances, gains and costs, against what can be reckoned by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution

from autotune.estimate import Prediction
from autotune.search.beliefs import GAIN, Beliefs, Observation
from autotune.search.configurations import Configuration, Configurations
from autotune.search.normal import at_least, expected_improvement, normal_cdf
from autotune.search.priors import Priors
from autotune.search.process import LogNormal, Prior, Process

MIB = 2**20
FIXED = {"pair": LogNormal(1.0, 0.0), "rest": LogNormal(1e-9, 0.0), "noise": LogNormal(1e-6, 0.0)}
LABELS = ("a", "b", "c", "d")


def priors(*peaks_mib: int, speed_sd: float = 1.0, peak_sd: float = 0.1) -> Priors:
    """Configurations of one categorical parameter, of which nothing is known beforehand but predicted peaks; the
    standard deviations of main effects are known, and levels nearly so."""
    distributions = {"choice": CategoricalDistribution(LABELS[: len(peaks_mib)])}
    rows = [
        Configuration({"choice": LABELS[n]}, None, Prediction(peak_bytes=mib * MIB)) for n, mib in enumerate(peaks_mib)
    ]
    configurations = Configurations(rows, distributions)
    count = len(rows)
    surface = configurations.surface(np.zeros((1, count)), np.zeros((count, 0)))
    known = Priors.of(configurations, None, 0)
    return Priors(
        configurations,
        Process(surface, Prior(level=1e-6, main=LogNormal(speed_sd, 0.0), **FIXED), 0),
        Process(surface, Prior(level=1e-6, main=LogNormal(peak_sd, 0.0), **FIXED), 0),
        known.failure,
        known.log_predicted,
    )


def measured(log_speed: float, peak_mib: float, seconds: float | None = None) -> Observation:
    return Observation("measured", log_speed, 0.0, round(peak_mib * MIB), seconds)


def test_the_chance_to_fit_is_that_of_the_ratio_to_the_prediction():
    """Predicted at the limit: even. At 10 % less of it in logarithms, one standard deviation: 84 %."""
    beliefs = Beliefs(priors(100, round(100 * math.exp(-0.1) * 1000) // 1000), [], 100 * MIB)
    assert beliefs.chance_usable(np.array([0, 1])) == pytest.approx([0.5, 0.841], abs=0.02)


def test_without_a_limit_everything_fits():
    assert Beliefs(priors(100, 10**6), [], None).chance_usable(np.array([0, 1])).tolist() == [1.0, 1.0]


def test_what_is_left_is_what_was_neither_tried_nor_is_being_tried():
    beliefs = Beliefs(priors(1, 1, 1, 1), [(2, measured(1.0, 1)), (0, Observation("running"))], None)
    assert beliefs.left.tolist() == [1, 3]


def test_the_best_is_the_fastest_that_was_measured_to_fit():
    seen = [(0, measured(3.0, 101)), (1, measured(1.0, 99)), (2, measured(2.0, 99)), (3, Observation("failed", 4.0))]
    assert Beliefs(priors(1, 1, 1, 1), seen, 100 * MIB).best == 2


def test_without_anything_that_fits_there_is_no_best():
    assert Beliefs(priors(1, 1), [(0, measured(3.0, 101))], 100 * MIB).best is None


def test_the_chance_that_something_left_is_faster_by_hand():
    """The best is at 0; one is left, normal around 0 with a standard deviation of 1: above 0.00995 in 49.6 %."""
    beliefs = Beliefs(priors(100, 100), [(0, measured(0.0, 100))], None)
    assert beliefs.chance_left(0) == pytest.approx(0.496, abs=0.04)


def test_the_chance_that_something_left_fits_and_is_faster_is_their_product():
    """The same, predicted at the limit with an even chance to fit."""
    beliefs = Beliefs(priors(50, 100), [(0, measured(0.0, 50))], 100 * MIB)
    assert beliefs.chance_left(0) == pytest.approx(0.248, abs=0.04)


def test_two_that_are_left_have_a_joint_chance():
    """Two independent ones that are above with 49.6 % each: 1 - 0.504 ** 2."""
    beliefs = Beliefs(priors(100, 100, 100), [(0, measured(0.0, 100))], None)
    assert beliefs.chance_left(1) == pytest.approx(1 - 0.504**2, abs=0.04)


def test_where_nothing_that_was_measured_fits_the_chance_is_that_anything_does():
    beliefs = Beliefs(priors(200, 100), [(0, measured(0.0, 200))], 100 * MIB)
    assert beliefs.chance_left(0) == pytest.approx(0.5, abs=0.04)


def test_with_nothing_left_there_is_no_chance():
    assert Beliefs(priors(1), [(0, measured(0.0, 1))], None).chance_left(0) == 0.0


def test_promise_is_gain_times_chance():
    """Both have the same expected improvement; one fits for sure, the other with an even chance."""
    promise = Beliefs(priors(50, 50, 100), [(0, measured(0.0, 50))], 100 * MIB).promise(np.array([1, 2]))
    assert promise[1] < 0.5 * promise[0]


def test_promise_is_per_second_of_trial():
    """Of two that may gain alike, the one that is expected to be slow costs more seconds."""
    seen = [(0, measured(0.0, 1, 10.0)), (1, measured(-2.0, 1, 60.0))]
    beliefs = Beliefs(priors(1, 1, 1), seen, None)
    fast, slow = beliefs._expected_seconds(np.array([0.0, -2.0]), np.ones(2))
    assert fast == pytest.approx(10, rel=0.25)
    assert slow == pytest.approx(60, rel=0.25)


def test_expected_improvement_by_hand():
    """Around 0 with a standard deviation of 1: the density at 0, 0.3989; one standard deviation up, 1.0833."""
    found = expected_improvement(np.array([0.0, 1.0, 0.5]), np.array([1.0, 1.0, 0.0]))
    assert found == pytest.approx([0.39894, 1.08332, 0.5], abs=1e-5)


def test_the_normal_distribution_function():
    assert normal_cdf(np.array([-1.959964, 0.0, 1.0])) == pytest.approx([0.025, 0.5, 0.8413447], abs=1e-7)


def test_a_bound_leaves_the_moments_of_the_truncatednormal_cdf():
    """Standard normal above 0: mean 0.79788, variance 0.36338; combined with the prior, the site gives these back."""
    value, error = at_least(0.0, 0.0, 1.0)
    precision = 1 + 1 / error**2
    assert value / error**2 / precision == pytest.approx(0.79788, abs=1e-4)
    assert 1 / precision == pytest.approx(0.36338, abs=1e-4)


def test_a_bound_far_above_what_was_believed_moves_the_belief_there():
    value, error = at_least(30.0, 0.0, 1.0)
    assert value / error**2 / (1 + 1 / error**2) == pytest.approx(30.0, rel=0.01)


def test_running_out_of_memory_lowers_the_chance_of_its_like_and_not_of_what_is_unlike():
    """Peaks come out above the prediction for one choice; another keeps its chance."""
    base = Beliefs(priors(100, 100), [], 100 * MIB)
    seen = [(0, Observation("out of memory", peak_bytes=125 * MIB))]
    after = Beliefs(priors(100, 100), seen, 100 * MIB)
    every = np.array([0, 1])
    assert after.chance_usable(every)[0] < 0.02
    assert after.chance_usable(every)[1] == pytest.approx(base.chance_usable(every)[1], abs=0.02)


def test_what_fails_keeps_the_search_from_its_like():
    """Two parameters; what fails has one choice that nothing sound has, and one that something sound has."""
    names = {"bad": CategoricalDistribution((0, 1)), "other": CategoricalDistribution((0, 1, 2))}
    rows = [Configuration({"bad": a, "other": b}) for a in range(2) for b in range(3)]
    known = Priors.of(Configurations(rows, names), None, 0)
    seen = [(0, measured(1.0, 1)), (1, measured(1.0, 1)), (3, Observation("failed"))]
    chance = Beliefs(known, seen, None).chance_usable(np.arange(6))
    assert chance[4] < 0.3 < 0.9 < chance[2]


def test_a_measured_bias_of_the_prediction_is_learned_for_all():
    """Real priors: what is measured 8 % above its prediction leaves little chance to what is predicted 3 % below."""
    names = {"choice": CategoricalDistribution(LABELS)}
    rows = [
        Configuration({"choice": label}, None, Prediction(peak_bytes=mib * MIB))
        for label, mib in zip(LABELS, (90, 80, 97, 70), strict=True)
    ]
    known = Priors.of(Configurations(rows, names), 100 * MIB, 0)
    before = Beliefs(known, [], 100 * MIB).chance_usable(np.array([2]))
    after = Beliefs(known, [(3, measured(1.0, 75.6)), (1, measured(1.0, 86.4))], 100 * MIB)
    assert before > 0.5
    assert after.chance_usable(np.array([2])) < 0.05


def test_a_prediction_that_may_be_further_off_leaves_more_of_a_chance():
    """Real priors, 2 % above the limit: its upper end 2 % above it, or 10 %."""
    rows = [
        Configuration({"choice": label}, None, Prediction(peak_bytes=102 * MIB, high_bytes=round(high * MIB)))
        for label, high in zip("ab", (104.04, 112.2), strict=True)
    ]
    known = Priors.of(Configurations(rows, {"choice": CategoricalDistribution(("a", "b"))}), 100 * MIB, 0)
    assert known.peak.surface.own == pytest.approx([1.0, 5.0])
    seen = [(0, measured(1.0, 102.0))]
    sure, unsure = Beliefs(known, seen, 100 * MIB).chance_usable(np.array([0, 1]))
    assert sure < 0.05 < unsure < 0.5


def test_prior_gains_add_up_and_one_that_is_measured_teaches_of_its_technique():
    """bf16 is believed to gain 0.2, give or take 0.2, tcmalloc 0.1: both together 0.3. Where bf16 alone is measured to
    lose 0.3, both are believed to lose too."""
    names = {"precision": CategoricalDistribution((0, 1)), "allocator": CategoricalDistribution((0, 1))}
    gains = {"precision": (0.2, 0.2), "allocator": (0.1, 0.1)}
    rows = [
        Configuration(
            {"precision": a, "allocator": b},
            prior_gains={n: gains[n] for n, on in zip(gains, (a, b), strict=True) if on},
        )
        for a in range(2)
        for b in range(2)
    ]
    known = Priors.of(Configurations(rows, names), None, 0)
    every = np.arange(4)
    before = Beliefs(known, [], None).speed.marginals(every)[0].mean(0)
    assert before - before[0] == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=0.01)
    after = Beliefs(known, [(0, measured(1.0, 1)), (2, measured(0.7, 1))], None).speed.marginals(every)[0].mean(0)
    assert after[2] == pytest.approx(0.7, abs=0.02)
    assert after[3] < after[1]


def test_a_trial_that_is_running_teaches_nothing_but_that_it_will_be_known():
    """Its expected value stands in for it: means stay, and only uncertainty shrinks."""
    known = priors(1, 1, 1)
    alone = Beliefs(known, [(0, measured(1.0, 1))], None)
    both = Beliefs(known, [(0, measured(1.0, 1)), (1, Observation("running"))], None)
    every = np.arange(3)
    assert both.speed.marginals(every)[0] == pytest.approx(alone.speed.marginals(every)[0], abs=1e-6)
    assert both.speed.marginals(every)[1][0, 1] < 1e-6 < alone.speed.marginals(every)[1][0, 1]


def test_the_least_gain_that_counts_is_one_percent():
    assert math.exp(GAIN) == pytest.approx(1.01)
