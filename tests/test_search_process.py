"""The Gaussian process, against what can be reckoned by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.search.process import Hyper, LogNormal, Prior, Process, Surface

NOTHING = LogNormal(1e-9, 0.0)
ONE = LogNormal(1.0, 0.0)


def prior(**changes) -> Prior:
    """Hyperparameters that are known: everything 1, but nothing of a configuration's own, and no noise."""
    return Prior(**{"level": 1.0, "main": ONE, "pair": ONE, "rest": NOTHING, "noise": NOTHING, **changes})


def surface(*positions: tuple[float, ...], ordered: bool = False, mean: float = 0.0) -> Surface:
    count, width = len(positions), len(positions[0])
    means, trends = np.full((1, count), mean), np.zeros((count, 0))
    return Surface(np.array(positions), np.full(width, ordered), means, trends, np.ones(count))


def given(process: Process, *measured: tuple[int, float]):
    index = np.array([number for number, _ in measured], dtype=np.intp)
    return process.given(index, np.array([value for _, value in measured]), np.zeros(len(measured)))


def overall(posterior, number: int) -> tuple[float, float]:
    return tuple(round(value, 6) for value in posterior.overall(number))


def test_before_any_measurement_the_prior_holds():
    """A level of variance 1 and a main effect of variance 1."""
    assert overall(given(Process(surface((0.0,), (1.0,), mean=7.0), prior(), 0)), 1) == (7.0, 2.0)


def test_one_measurement_moves_its_own_level_and_half_as_much_the_other():
    """Variance 2, of which 1 is shared, and noise of variance 1: 2/3 of what was measured, and 1/3."""
    posterior = given(Process(surface((0.0,), (1.0,)), prior(noise=ONE), 0), (0, 3.0))
    assert overall(posterior, 0) == (2.0, pytest.approx(2 - 4 / 3, abs=1e-6))
    assert overall(posterior, 1) == (1.0, pytest.approx(2 - 1 / 3, abs=1e-6))


def test_what_a_measurement_says_of_its_own_noise_counts():
    process = Process(surface((0.0,), (1.0,)), prior(), 0)
    posterior = process.given(np.array([0]), np.array([3.0]), np.array([2.0]))
    assert overall(posterior, 0) == (pytest.approx(3 * 2 / 4, abs=1e-6), pytest.approx(2 - 4 / 4, abs=1e-6))


def test_pairs_have_the_product_of_their_main_effects_times_the_share():
    """Equal in both parameters: 1 + 4 + 9, and 2 * 3 of the pair; in one, 1 + 4 or 1 + 9; in none, the level's 1."""

    one = np.array([1.0])
    hyper = Hyper(main=np.array([[2.0, 3.0]]), pair=one, rest=0 * one, noise=0 * one, alternative=np.array([0]))
    process, every = Process(surface((0, 0), (0, 1), (1, 0), (1, 1)), prior(), 0), np.arange(4)
    assert process.covariance(hyper, every, every)[0, 0].tolist() == [1 + 4 + 9 + 6, 1 + 4, 1 + 9, 1]
    assert process.variance(hyper, every)[0].tolist() == [20, 20, 20, 20]


def test_what_may_be_off_by_more_than_others_is_believed_less():
    """Level and main effect of variance 1 each; of a configuration's own 1, or 9 where it may be off by three times as
    much: a measurement there moves its like by 2/11 of itself, where another moves it by 2/3."""
    rows = surface((0.0,), (0.0,), (0.0,))
    process = Process(replace(rows, own=np.array([1.0, 3.0, 0.0])), prior(rest=ONE), 0)
    assert [overall(given(process), number)[1] for number in range(3)] == [3.0, 11.0, 2.0]
    assert overall(given(process, (0, 3.0)), 2)[0] == pytest.approx(3.0 * 2 / 3, abs=1e-6)
    assert overall(given(process, (1, 3.0)), 2)[0] == pytest.approx(3.0 * 2 / 11, abs=1e-6)


def test_an_interaction_is_learned_from_four_cells():
    """facts/memory.md: each choice alone says little of both together (376, 434, 324 and 510 samples/s)."""
    logs = np.log([376.0, 434.0, 324.0, 510.0])
    process = Process(surface((0, 0), (1, 0), (0, 1), (1, 1)), prior(level=5.0), 0)
    before = given(process, *zip(range(3), logs[:3], strict=True)).overall(3)
    after = given(process, *zip(range(4), logs, strict=True)).overall(3)
    assert before[0] < logs[1] < after[0] == pytest.approx(logs[3], abs=1e-6)
    assert before[1] > 0.1
    assert after[1] == pytest.approx(0.0, abs=1e-6)


def test_along_an_ordered_parameter_neighbours_tell_more_than_distant_values():
    process = Process(surface((0.0,), (0.5,), (3.0,), ordered=True), prior(level=1e-6), 0)
    posterior = given(process, (0, 1.0))
    assert overall(posterior, 1)[0] == pytest.approx(np.exp(-0.125), abs=1e-6)
    assert overall(posterior, 2)[0] == pytest.approx(np.exp(-4.5), abs=1e-6)


def test_of_two_prior_means_the_one_that_explains_the_measurements_is_kept():
    """The process is flat; one of the means rises by 1."""
    flat = prior(level=1.0, main=LogNormal(0.01, 0.0))
    means = np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
    positions, ordered = np.array([[0.0], [1.0], [2.0]]), np.array([True])
    process = Process(Surface(positions, ordered, means, np.zeros((3, 0)), np.ones(3)), flat, 0)
    assert given(process, (0, 5.0), (1, 6.0)).overall(2)[0] == pytest.approx(7.0, abs=0.05)


def test_how_far_one_lies_above_another_is_free_of_what_both_share():
    """The level has variance 10,000; two main effects of variance 1 differ by variance 2."""
    posterior = given(Process(surface((0.0,), (1.0,)), prior(level=100.0), 0))
    mean, variance = posterior.above(np.array([1]), 0)
    assert (mean.max(), variance.round(6).max()) == (0.0, 2.0)


def test_joint_draws_have_the_posteriors_moments():
    """Shared variance 1 of 2: a correlation of 1/2."""
    posterior = given(Process(surface((0.0,), (1.0,)), prior(), 0))
    drawn = posterior.draw(np.array([0, 1]), 20_000, np.random.default_rng(0))
    assert drawn.mean(0) == pytest.approx([0, 0], abs=0.05)
    assert np.cov(drawn.T) == pytest.approx(np.array([[2, 1], [1, 2]]), abs=0.1)


def test_an_outlier_among_many_repeats_is_mistrusted():
    """Nine repeats at 0 and one 8 % low, with noise of 1 %: the estimate stays near 0, where the mean is 0.8 % low."""
    process = Process(surface((0.0,), (1.0,)), prior(noise=LogNormal(0.01, 0.0)), 0)
    assert given(process, *[(0, 0.0)] * 9, (0, -0.08)).overall(0)[0] == pytest.approx(-0.001, abs=0.0015)


def test_the_same_seed_gives_the_same_posterior():
    vague = prior(main=LogNormal(0.3, 1.0), noise=LogNormal(0.01, 1.0))
    positions = [(float(a), float(b)) for a in range(3) for b in range(2)]
    first, second = (
        given(Process(surface(*positions), vague, 5), (0, 1.0), (3, 1.4)).marginals(np.arange(6))[0] for _ in range(2)
    )
    assert (first == second).all()
