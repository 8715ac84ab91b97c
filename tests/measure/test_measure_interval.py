"""The 95 % interval of a throughput: right as often as it says, for correlated windows too."""

import math

import pytest
import torch

from autotune.measure.timing.interval import confidence_interval


def _window_seconds(num_windows: int, correlation: float, generator: torch.Generator) -> list[float]:
    """Windows of mean 1 s and standard deviation 0.05 s, as a first-order autoregression in its steady state."""
    noise = torch.randn(num_windows, dtype=torch.float64, generator=generator).tolist()
    values, value = [], noise[0]
    for fresh in noise:
        value = correlation * value + math.sqrt(1 - correlation**2) * fresh
        values.append(1 + 0.05 * value)
    return values


@pytest.mark.parametrize(("num_windows", "correlation"), [(8, 0.0), (16, 0.3), (50, 0.3), (50, 0.6)])
def test_interval_holds_the_true_speed_in_90_to_99_percent_of_runs(num_windows, correlation):
    generator = torch.Generator().manual_seed(1)
    amounts = [100.0] * num_windows
    held = 0
    for _ in range(200):
        low, high = confidence_interval(amounts, _window_seconds(num_windows, correlation, generator))
        held += low <= 100.0 <= high
    assert 0.90 <= held / 200 <= 0.99


def test_windows_that_agree_leave_no_doubt():
    low, high = confidence_interval([32.0] * 8, [0.5] * 8)
    assert low == pytest.approx(64.0, rel=1e-12)
    assert high == pytest.approx(64.0, rel=1e-12)


def test_same_windows_give_the_same_interval():
    seconds = _window_seconds(20, 0.3, torch.Generator().manual_seed(3))
    assert confidence_interval([1.0] * 20, seconds) == confidence_interval([1.0] * 20, seconds)


def test_correlated_windows_widen_the_interval():
    """Forty windows in two long spells know less than the same forty in alternation."""
    spells = [1.0] * 20 + [1.2] * 20
    alternating = [1.0, 1.2] * 20
    wide, narrow = (confidence_interval([1.0] * 40, seconds) for seconds in (spells, alternating))
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])


def test_lower_end_is_no_negative_speed():
    assert confidence_interval([1.0, 1.0, 1.0], [0.1, 10.0, 0.1])[0] >= 0.0
