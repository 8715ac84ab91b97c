"""Gaussian regression over a finite set, against what can be reckoned by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from autotune.searches.sampler.surrogate import Posterior, Scales, Surrogate

NOTHING = 1e-9


def surrogate(*inputs: tuple[float, ...], factors: Sequence[float] | None = None, **options) -> Surrogate:
    """Level, main effects and pairs of 1; nothing of a configuration's own, and no noise."""
    count = len(inputs)
    is_ordered, trends = options.pop("ordered", False), options.pop("trends", ())
    scales = Scales(**{"level": 1.0, "main": 1.0, "pair": 1.0, "own": NOTHING, "noise": NOTHING, **options})
    return Surrogate(
        inputs=np.array(inputs, dtype=float),
        is_ordered=np.full(len(inputs[0]), is_ordered),
        mean=np.zeros(count),
        trends=np.array(trends, dtype=float).reshape(count, -1),
        scales=scales,
        own_factors=np.ones(count) if factors is None else np.array(factors),
    )


def given(prior: Surrogate, *measured: tuple[int, float], error: float = 0.0) -> Posterior:
    index = np.array([number for number, _ in measured], dtype=np.intp)
    values = np.array([value for _, value in measured], dtype=float)
    return Posterior(prior, index, values, np.full(len(measured), error))


def moments(posterior: Posterior, number: int) -> tuple[float, float]:
    return round(float(posterior.mean[number]), 6), round(float(posterior.variance[number]), 6)


def test_before_any_measurement_the_prior_holds():
    """A level of variance 1 and a main effect of variance 1."""
    assert moments(given(surrogate((0,), (1,))), 1) == (0.0, 2.0)


def test_one_measurement_moves_its_own_configuration_and_half_as_much_the_other():
    """Variance 2, of which 1 is shared, and noise of variance 1: 2/3 of what was measured, and 1/3. It lies one
    standard deviation off, as far as the scales say, so that they stay."""
    posterior = given(surrogate((0,), (1,), noise=1.0), (0, 3**0.5))
    assert moments(posterior, 0) == pytest.approx((3**0.5 * 2 / 3, 2 - 4 / 3), abs=1e-6)
    assert moments(posterior, 1) == pytest.approx((3**0.5 / 3, 2 - 1 / 3), abs=1e-6)


def test_what_a_measurement_says_of_its_own_error_counts():
    """Variance 2 beside an error of variance 2: half of 2."""
    assert moments(given(surrogate((0,), (1,)), (0, 2.0), error=2**0.5), 0) == (1.0, 1.0)


@pytest.mark.parametrize(("value", "ratio"), [(0.0, 6 / 7), (1.0, 1.0), (3.0, 15 / 7)])
def test_measurements_further_off_than_the_scales_say_widen_all_of_them(value: float, ratio: float):
    """The scales count for six measurements: one at n standard deviations makes variances (6 + n²) / 7 of it."""
    posterior = given(surrogate((0,), (1,), level=NOTHING, noise=NOTHING), (0, value))
    assert moments(posterior, 1) == pytest.approx((0.0, ratio), abs=1e-6)


def test_pairs_are_shared_where_both_parameters_are():
    """Level 1, main 2, pair 3: equal in both 1 + 4 + 4 + 9, in one 1 + 4, in none 1."""
    prior, every = surrogate((0, 0), (0, 1), (1, 1), main=2.0, pair=3.0), np.arange(3)
    assert prior.covariance(every, every)[0].tolist() == [18, 5, 1]
    assert prior.variance().tolist() == [18, 18, 18]


def test_what_may_be_off_by_more_than_others_is_believed_less():
    """Level and main effect of variance 1 each; of a configuration's own 1, or 9 where it may be off by three times as
    much: a measurement there moves its like by 2/11 of itself, where another moves it by 2/3."""
    prior = surrogate((0,), (0,), (0,), factors=[1.0, 3.0, 0.0], own=1.0)
    assert [moments(given(prior), number)[1] for number in range(3)] == [3.0, 11.0, 2.0]
    assert moments(given(prior, (0, 3.0)), 2)[0] == pytest.approx(3.0 * 2 / 3, abs=1e-6)
    assert moments(given(prior, (1, 3.0)), 2)[0] == pytest.approx(3.0 * 2 / 11, abs=1e-6)


def test_a_trend_is_learned_from_one_measurement_for_all():
    """One factor for three configurations, at which it counts 0, 1 and 2: measured 1 at the second, the third has 2."""
    prior = surrogate((0,), (0,), (0,), trends=[0.0, 1.0, 2.0], level=NOTHING, main=NOTHING)
    assert moments(given(prior, (1, 1.0)), 2) == (2.0, 0.0)


def test_an_interaction_is_learned_from_four_cells():
    """facts/memory.md: each choice alone says little of both together (376, 434, 324 and 510 samples/s)."""
    logs = np.log([376.0, 434.0, 324.0, 510.0])
    prior = surrogate((0, 0), (1, 0), (0, 1), (1, 1), level=5.0)
    before = moments(given(prior, *zip(range(3), logs[:3], strict=True)), 3)
    after = moments(given(prior, *zip(range(4), logs, strict=True)), 3)
    assert before[0] < logs[1] < after[0] == pytest.approx(logs[3], abs=1e-6)
    assert before[1] > 0.1
    assert after[1] == pytest.approx(0.0, abs=1e-6)


def test_along_an_ordered_parameter_neighbours_tell_more_than_distant_values():
    """Half a length scale away exp(-1/8) of what was measured, three away exp(-9/2)."""
    posterior = given(surrogate((0.0,), (0.5,), (3.0,), ordered=True, level=NOTHING), (0, 1.0))
    assert moments(posterior, 1)[0] == pytest.approx(np.exp(-0.125), abs=1e-6)
    assert moments(posterior, 2)[0] == pytest.approx(np.exp(-4.5), abs=1e-6)


def test_two_configurations_have_in_common_what_is_shared():
    """Level and main effect of variance 1 each: covariance 1. One measured with noise of variance 2: 1 - 2 * 1 / 4."""
    zero, one = np.array([0]), np.array([1])
    assert given(surrogate((0,), (1,))).covariance(zero, one).round(6).tolist() == [[1.0]]
    after = given(surrogate((0,), (1,), noise=2**0.5), (0, 2.0))
    assert after.covariance(zero, one).round(6).tolist() == [[0.5]]
