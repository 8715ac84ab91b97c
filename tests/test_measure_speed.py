"""Timed windows, driven by a clock that moves only when a step says so."""

import itertools

import pytest

from autotune.measure import MeasureOptions
from autotune.measure.steps import Step
from autotune.measure.timing import speed
from autotune.measure.timing.speed import FEWEST_WINDOWS, Window, speed_of, time_windows


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class FakeFeed:
    wait_s = 0.0
    epoch_start_s = 0.0
    epoch_samples = None


class FakeSteps:
    """Steps of 32 samples whose seconds, waiting, and epoch starts or compiling are given in a table."""

    def __init__(self, clock, table):
        self.feed = FakeFeed()
        self.aside_s = 0.0
        self._clock, self._table = clock, itertools.cycle(table)

    def step(self):
        seconds, wait_s, aside_s = next(self._table)
        self.feed.wait_s += wait_s
        self.aside_s += aside_s
        self._clock.now_s += seconds + aside_s
        return Step(32, False)

    def settle(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(speed, "perf_counter", fake)
    return fake


def _options(trial_time_s=60.0, precision=0.02):
    return MeasureOptions(trial_time_s=trial_time_s, precision=precision, parity_batch=32)


def _run(clock, table, options=None, at_edge=lambda: False):
    return time_windows(FakeSteps(clock, table), options or _options(), at_edge)


def test_a_window_is_the_fewest_whole_steps_that_last_50_ms(clock):
    windows = _run(clock, [(0.02, 0.0, 0.0)])
    assert {w.num_steps for w in windows} == {3}
    assert windows[0].num_samples == 96
    assert windows[0].seconds == pytest.approx(0.06)


def test_windows_that_agree_end_at_the_second_narrow_look(clock):
    """Looks come after 8 and 10 windows."""
    assert len(_run(clock, [(0.06, 0.0, 0.0)])) == 10


def test_noise_asks_for_more_windows(clock):
    steady = len(_run(clock, [(0.060, 0.0, 0.0)]))
    noisy = len(_run(clock, [(0.060, 0.0, 0.0), (0.075, 0.0, 0.0), (0.051, 0.0, 0.0), (0.095, 0.0, 0.0)]))
    assert noisy > steady


def test_time_share_ends_what_stays_noisy(clock):
    windows = _run(clock, [(0.06, 0.0, 0.0), (0.3, 0.0, 0.0), (0.9, 0.0, 0.0)], _options(trial_time_s=3.0))
    assert 3.0 <= clock.now_s < 3.0 + 0.9
    assert len(windows) > FEWEST_WINDOWS


def test_a_step_longer_than_the_time_share_still_gives_three_windows(clock):
    assert len(_run(clock, [(20.0, 0.0, 0.0)], _options(trial_time_s=5.0))) == 3


def test_the_edge_may_end_it_after_three_windows(clock):
    assert len(_run(clock, [(0.06, 0.0, 0.0)], at_edge=lambda: True)) == 3


def test_epoch_starts_are_not_in_a_window(clock):
    windows = _run(clock, [(0.03, 0.0, 0.0), (0.03, 0.0, 5.0)])
    assert all(w.seconds == pytest.approx(0.06) for w in windows)


def test_waiting_for_data_is_counted_within_the_window(clock):
    windows = _run(clock, [(0.06, 0.045, 0.0)])
    assert all(w.wait_s == pytest.approx(0.045) for w in windows)


def test_an_epochs_start_is_spread_over_its_samples():
    """300 samples in 3 s; epochs of 100 samples start in 0.5 s: 100 samples take 1.5 s."""
    feed = FakeFeed()
    feed.epoch_start_s, feed.epoch_samples = 0.5, 100
    found = speed_of([Window(1.0, 100, 1, 0.0, 1.0, 1.0)] * 3, feed)
    assert found.value == pytest.approx(100 / 1.5)
    assert found.low <= found.value <= found.high


def test_a_stream_without_an_end_has_no_epoch_to_amortise():
    feed = FakeFeed()
    feed.epoch_start_s = 0.5
    assert speed_of([Window(1.0, 100, 1, 0.0, 1.0, 1.0)] * 3, feed).value == pytest.approx(100.0)
