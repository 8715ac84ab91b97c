"""The acquisition: chances, gains and costs, against what can be reckoned by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution

from autotune.estimates import Prediction
from autotune.searches.sampler.acquisition import GAIN, Acquisition
from autotune.searches.sampler.configurations import Configuration, Configurations
from autotune.searches.sampler.priors import Priors
from autotune.searches.sampler.surrogate import Scales
from autotune.searches.store.observations import Observation

MIB = 2**20
LABELS = ("a", "b", "c", "d")


def priors(*peaks_mib: int, speed_sd: float = 1.0, peak_sd: float = 0.1) -> Priors:
    """Configurations of one categorical parameter, of which nothing is known beforehand but predicted peaks: each has
    its own speed and peak, independent of the others'."""
    distributions = {"choice": CategoricalDistribution(LABELS[: len(peaks_mib)])}
    rows = [
        Configuration({"choice": LABELS[n]}, None, Prediction(peak_bytes=mib * MIB)) for n, mib in enumerate(peaks_mib)
    ]
    known = Priors.of(Configurations(rows, distributions), None)
    nothing = replace(known.speed, mean=np.zeros(len(rows)), trends=np.zeros((len(rows), 0)))
    return replace(
        known,
        speed=replace(nothing, scales=Scales(1e-6, main=speed_sd, pair=0.0, own=0.0, noise=1e-6)),
        peak=replace(nothing, scales=Scales(1e-6, main=peak_sd, pair=0.0, own=0.0, noise=1e-6)),
    )


def measured(log_speed: float, peak_mib: float, seconds: float | None = None) -> Observation:
    return Observation("measured", log_speed, 0.0, round(peak_mib * MIB), seconds)


def test_the_chance_to_fit_is_that_of_the_ratio_to_the_prediction():
    """Predicted at the limit: even. At 10 % less of it in logarithms, one standard deviation: 84 %."""
    acquisition = Acquisition(priors(100, round(100 * math.exp(-0.1) * 1000) // 1000), [], 100 * MIB)
    assert acquisition.chance_usable == pytest.approx([0.5, 0.841], abs=0.02)


def test_without_a_limit_everything_fits():
    assert Acquisition(priors(100, 10**6), [], None).chance_usable.tolist() == [1.0, 1.0]


def test_what_is_left_is_what_was_neither_tried_nor_is_being_tried():
    acquisition = Acquisition(priors(1, 1, 1, 1), [(2, measured(1.0, 1)), (0, Observation("running"))], None)
    assert acquisition.left.tolist() == [1, 3]


def test_the_best_is_the_fastest_that_was_measured_to_fit():
    seen = [(0, measured(3.0, 101)), (1, measured(1.0, 99)), (2, measured(2.0, 99)), (3, Observation("failed", 4.0))]
    assert Acquisition(priors(1, 1, 1, 1), seen, 100 * MIB).best == 2


def test_without_anything_that_fits_there_is_no_best():
    assert Acquisition(priors(1, 1), [(0, measured(3.0, 101))], 100 * MIB).best is None


def test_two_that_are_left_have_a_joint_chance():
    """Two independent ones that fit with an even chance each, beside one that does not: 1 - 0.5 ** 2."""
    acquisition = Acquisition(priors(200, 100, 100), [(0, measured(0.0, 200))], 100 * MIB)
    assert acquisition.chance_left(1) == pytest.approx(0.75, abs=0.07)


def test_the_expected_gain_of_one_that_fits_with_an_even_chance_is_half():
    """Normal around the best with a variance of 6/7, since what was measured is as believed: 0.399 times its root."""
    acquisition = Acquisition(priors(50, 50, 100), [(0, measured(0.0, 50))], 100 * MIB)
    assert acquisition.gain[1:] == pytest.approx([0.369, 0.185], abs=0.001)


def test_where_nothing_was_measured_a_gain_is_over_the_fastest_that_is_surest_to_fit():
    """That one itself can bring no more than it brings; one that may fit can bring more."""
    acquisition = Acquisition(priors(50, 60, 100, 300), [], 100 * MIB)
    assert acquisition.best is None
    assert acquisition.gain[0] < 1e-4 < acquisition.gain[2] < acquisition.gain[1]


def test_where_nothing_fits_yet_and_nothing_may_gain_the_surest_is_proposed():
    """The other needs twice the limit: seven standard deviations."""
    acquisition = Acquisition(priors(200, 50), [], 100 * MIB)
    assert acquisition.propose(acquisition.left) == 1


def test_where_nothing_fits_yet_what_may_gain_goes_before_the_surest():
    """With an even chance to fit, it gains 0.28 in the logarithm of the speed."""
    acquisition = Acquisition(priors(50, 100), [], 100 * MIB)
    assert acquisition.propose(acquisition.left) == 1


def test_where_nothing_that_was_measured_fits_the_chance_is_that_anything_does():
    acquisition = Acquisition(priors(200, 100), [(0, measured(0.0, 200))], 100 * MIB)
    assert acquisition.chance_left(0) == pytest.approx(0.5, abs=0.07)


def test_with_nothing_left_there_is_no_chance():
    assert Acquisition(priors(1), [(0, measured(0.0, 1))], None).chance_left(0) == 0.0


def test_promise_is_gain_times_chance():
    """Both have the same expected improvement; one fits for sure, the other with an even chance."""
    promise = Acquisition(priors(50, 50, 100), [(0, measured(0.0, 50))], 100 * MIB).promise()[1:]
    assert promise[1] < 0.5 * promise[0]


def test_promise_is_per_second_of_trial():
    """Measured at a speed of 1 in 10 s and of 1/e² in 60 s: others that are expected to be as fast take as long."""
    seen = [(0, measured(0.0, 1, 10.0)), (1, measured(-2.0, 1, 60.0))]
    known = priors(1, 1, 1, 1)
    known = replace(known, speed=replace(known.speed, mean=np.array([0.0, -2.0, 0.0, -2.0])))
    fast, slow = Acquisition(known, seen, None)._expected_seconds()[2:]
    assert fast == pytest.approx(10, rel=0.25)
    assert slow == pytest.approx(60, rel=0.25)


def test_promise_is_the_expected_improvement_by_hand():
    """The best at 0, a standard deviation above what was believed; others around 0 and 1 with a deviation of 1: 0.3989
    and 1.0833."""
    known = priors(1, 1, 1)
    known = replace(known, speed=replace(known.speed, mean=np.array([-1.0, 0.0, 1.0])))
    promise = Acquisition(known, [(0, measured(0.0, 1))], None).promise()[1:]
    assert promise == pytest.approx([0.39894, 1.08332], abs=1e-4)


def test_running_out_of_memory_lowers_the_chance_of_its_like_and_not_of_what_is_unlike():
    """Peaks come out above the prediction for one choice; another keeps its chance."""
    base = Acquisition(priors(100, 100), [], 100 * MIB)
    seen = [(0, Observation("out of memory", peak_bytes=125 * MIB))]
    after = Acquisition(priors(100, 100), seen, 100 * MIB)
    assert after.chance_usable[0] < 0.02
    assert after.chance_usable[1] == pytest.approx(base.chance_usable[1], abs=0.02)


def test_what_fails_keeps_the_search_from_its_like():
    """Two parameters; what fails has one choice that nothing sound has, and one that something sound has."""
    names = {"bad": CategoricalDistribution((0, 1)), "other": CategoricalDistribution((0, 1, 2))}
    rows = [Configuration({"bad": a, "other": b}) for a in range(2) for b in range(3)]
    known = Priors.of(Configurations(rows, names), None)
    seen = [(0, measured(1.0, 1)), (1, measured(1.0, 1)), (3, Observation("failed"))]
    chance = Acquisition(known, seen, None).chance_usable
    assert chance[4] < 0.3 < 0.9 < chance[2]


def test_a_measured_bias_of_the_prediction_is_learned_for_all():
    """Real priors: what is measured 8 % above its prediction leaves little chance to what is predicted 3 % below."""
    names = {"choice": CategoricalDistribution(LABELS)}
    rows = [
        Configuration({"choice": label}, None, Prediction(peak_bytes=mib * MIB))
        for label, mib in zip(LABELS, (90, 80, 97, 70), strict=True)
    ]
    known = Priors.of(Configurations(rows, names), 100 * MIB)
    before = Acquisition(known, [], 100 * MIB).chance_usable[2]
    after = Acquisition(known, [(3, measured(1.0, 75.6)), (1, measured(1.0, 86.4))], 100 * MIB)
    assert before > 0.5
    assert after.chance_usable[2] < 0.1


def test_a_prediction_that_may_be_further_off_leaves_more_of_a_chance():
    """Real priors, 2 % above the limit: its upper end 2 % above it, or 10 %."""
    rows = [
        Configuration({"choice": label}, None, Prediction(peak_bytes=102 * MIB, high_bytes=round(high * MIB)))
        for label, high in zip("ab", (104.04, 112.2), strict=True)
    ]
    known = Priors.of(Configurations(rows, {"choice": CategoricalDistribution(("a", "b"))}), 100 * MIB)
    assert known.peak.own_factors == pytest.approx([1.0, 5.0])
    seen = [(0, measured(1.0, 102.0))]
    sure, unsure = Acquisition(known, seen, 100 * MIB).chance_usable
    assert sure < 0.05 < unsure < 0.5


def test_prior_gains_add_up_and_one_that_is_measured_teaches_of_its_technique():
    """bf16 is believed to gain 0.2, give or take 0.2, tcmalloc 0.1: both together 0.3. Where bf16 alone is measured to
    lose 0.3, it is believed to lose 0.25, since measurements differ by 0.1, and both are believed to lose too."""
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
    known = Priors.of(Configurations(rows, names), None)
    before = Acquisition(known, [], None).speed.mean
    assert before - before[0] == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=0.01)
    after = Acquisition(known, [(0, measured(1.0, 1)), (2, measured(0.7, 1))], None).speed.mean
    assert after[2] == pytest.approx(0.75, abs=0.02)
    assert after[3] < after[1]


def test_a_trial_that_is_running_teaches_nothing_but_that_it_will_be_known():
    """Its expected value stands in for it: means stay, and only uncertainty shrinks."""
    known = priors(1, 1, 1)
    alone = Acquisition(known, [(0, measured(1.0, 1))], None)
    both = Acquisition(known, [(0, measured(1.0, 1)), (1, Observation("running"))], None)
    assert both.speed.mean == pytest.approx(alone.speed.mean, abs=1e-6)
    assert both.speed.variance[1] < 1e-6 < alone.speed.variance[1]


def test_the_least_gain_that_counts_is_one_percent():
    assert math.exp(GAIN) == pytest.approx(1.01)


def pruned(*ratios: float) -> Priors:
    """Configurations that differ in nothing but the share of the widths that is pruned."""
    labels = tuple(map(str, ratios))
    rows = [
        Configuration({"pruning": label}, None, None, {}, label if ratio else "", {"pruning": ratio} if ratio else {})
        for label, ratio in zip(labels, ratios, strict=True)
    ]
    return Priors.of(Configurations(rows, {"pruning": CategoricalDistribution(labels)}), None)


def judged(lost: float, log_speed: float = 0.0) -> Observation:
    """Found to be too bad from three allowed drops on, as one look finds it."""
    return Observation("dropped" if lost > 3 else "measured", log_speed, lost=lost)


def test_a_half_pruned_is_as_likely_as_not_to_keep_its_quality_and_the_references_is_what_it_is():
    """A quarter is likely to hold, and nearly all of it is not."""
    chance = Acquisition(pruned(0.0, 0.25, 0.5, 0.95), [], None).chance_kept
    assert chance[0] == 1.0
    assert chance[1] > 0.8
    assert chance[2] == pytest.approx(0.5, abs=0.1)
    assert chance[3] < 0.15
    assert list(chance) == sorted(chance, reverse=True)


def test_what_lost_too_much_at_one_ratio_is_not_asked_for_at_a_larger_one():
    """Three of the allowed drops at a half: a quarter is still open, and nearly all is hopeless."""
    chance = Acquisition(pruned(0.0, 0.25, 0.5, 0.95), [(2, judged(3.2))], None).chance_kept
    assert chance[2] == 0.0
    assert chance[1] > 0.3
    assert chance[3] < 0.05


def test_what_lost_nothing_is_likely_to_hold_and_so_is_less_of_it():
    chance = Acquisition(pruned(0.0, 0.25, 0.5), [(2, judged(0.0))], None).chance_kept
    assert chance[2] > 0.9
    assert chance[1] > 0.9


def test_what_is_likelier_to_fall_than_to_hold_is_not_the_best():
    """The fastest lost twice of what is allowed in one look, which rules nothing out: the reference is the best."""
    seen = [(0, judged(0.0, 1.0)), (1, judged(2.0, 3.0))]
    acquisition = Acquisition(pruned(0.0, 0.25), seen, None)
    assert 0.0 < acquisition.chance_kept[1] < 0.5
    assert acquisition.best == 0


def test_the_quality_of_one_is_that_of_all_that_compute_the_same():
    """Two that differ in something else: what was judged of one holds for the other."""
    both = {"pruning": CategoricalDistribution(("none", "half")), "other": CategoricalDistribution(("a", "b"))}
    rows = [
        Configuration({"pruning": label, "other": other}, None, None, {}, "" if label == "none" else label, removed)
        for label, removed in (("none", {}), ("half", {"pruning": 0.5}))
        for other in ("a", "b")
    ]
    known = Priors.of(Configurations(rows, both), None)
    assert Acquisition(known, [(2, judged(80.0))], None).chance_kept.tolist() == [1.0, 1.0, 0.0, 0.0]
