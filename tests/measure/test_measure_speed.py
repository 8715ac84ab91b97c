"""Timed windows, driven by a clock that moves only when a step says so."""

import itertools
from contextlib import contextmanager

import pytest

from autotune.measure import MeasureOptions
from autotune.measure.timing import engine, speed
from autotune.measure.timing.engine import Reading, Timing, WarmUp
from autotune.measure.timing.speed import FEWEST_WINDOWS, Window, speed_of

CALM, TORN = (0.06, 0.0, 0.0), (0.12, 0.0, 0.0)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class FakeSteps:
    """Steps of 32 samples whose seconds, waiting, and epoch starts or compiling are given in a table."""

    decides_together, num_ahead = True, 0

    def __init__(self, clock, table):
        self._clock, self._table = clock, itertools.cycle(table)
        self._wait_s = self._between_s = 0.0
        self.compile_s, self.num_steps = 0.0, 0

    def step(self):
        seconds, wait_s, aside_s = next(self._table)
        self._wait_s += wait_s
        self._between_s += aside_s
        self._clock.now_s += seconds + aside_s
        self.num_steps += 1

    def settle(self):
        pass

    def at_edge(self):
        pass

    def read(self):
        now_s, samples = self._clock.now_s, 32 * self.num_steps
        return Reading(now_s, now_s, self._between_s, self.compile_s, self._wait_s, samples, self.num_steps, now_s)

    def mark(self):
        now = self.read()
        return lambda: now


class FakeCharge:
    """A peak that grows as it is told, over a budget or not."""

    is_cuda = False

    def __init__(self, peaks=(1000,), is_over=False):
        self._peaks, self._is_over = [*peaks], is_over

    def sample_descendants(self, every_s=0.0):
        pass

    def high_water_bytes(self):
        return self._peaks.pop(0) if len(self._peaks) > 1 else self._peaks[0]

    def exceeds(self, budget):
        return self._is_over


class FakeOtherWork:
    """What other work takes of each window, by a table; nothing of those after it."""

    table = ()

    def __init__(self):
        self._num_windows = 0

    def open(self):
        pass

    def close(self):
        self._num_windows += 1

    def seconds(self):
        return [next(iter(self.table[at : at + 1]), 0.0) for at in range(self._num_windows)]

    @contextmanager
    def at_rest(self):
        yield

    def end(self):
        pass


class QuietCard(FakeOtherWork):
    """A card that nobody else uses, and whose driver tells nothing."""

    def __init__(self, watches_others=True):
        super().__init__()

    def shares(self):
        return [0.0] * self._num_windows

    def state(self):
        return None


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(speed, "perf_counter", fake)
    monkeypatch.setattr(engine, "OtherWork", FakeOtherWork)
    monkeypatch.setattr(engine, "CardWatch", QuietCard)
    return fake


@pytest.fixture
def others(monkeypatch):
    """Say what other work takes of each window."""
    return lambda *table: monkeypatch.setattr(FakeOtherWork, "table", table)


def _options(trial_time_s=60.0, precision=0.02, **more):
    return MeasureOptions(trial_time_s=trial_time_s, precision=precision, parity_batch=32, **more)


def _timing(clock, table, options=None, charge=None, side=None):
    steps = FakeSteps(clock, table)
    timing, is_over = Timing(steps, charge or FakeCharge(), options or _options(), side), False
    while not is_over:
        steps.step()
        is_over = timing.stepped()
    return timing


def _run(clock, table, options=None, charge=None):
    return _timing(clock, table, options, charge).windows


def _stopped(clock, table, options=None, charge=None):
    return _timing(clock, table, options, charge).result()["stopped"]


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
    timing = _timing(clock, [(0.06, 0.0, 0.0)], charge=FakeCharge(is_over=True))
    assert (len(timing.windows), timing.result()["stopped"]) == (3, "over")


def test_what_ended_it_is_told(clock):
    assert _stopped(clock, [(0.06, 0.0, 0.0)]) == "precise"
    assert _stopped(clock, [(20.0, 0.0, 0.0)], _options(trial_time_s=5.0)) == "time"


def test_fewer_windows_than_three_are_no_result(clock):
    """As where a script ends by itself."""
    steps = FakeSteps(clock, [(0.06, 0.0, 0.0)])
    timing = Timing(steps, FakeCharge(), _options())
    for num_windows in (1, 2, 3):
        assert timing.result() is None
        steps.step()
        timing.stepped()
        assert len(timing.windows) == num_windows
    timing.end()
    assert timing.result()["num_windows"] == 3


def _num_warm_up_steps(clock, charge, fewest_steps=0, skips=0, compiles=0, options=None):
    """Of 10 ms each, the first of which are skipped by the loss scaler, or compile."""
    steps = FakeSteps(clock, [(0.01, 0.0, 0.0)])
    warm_up, is_over = WarmUp(steps, charge, options or _options(), fewest_steps), False
    while not is_over:
        steps.step()
        steps.compile_s += 0.001 * (steps.num_steps <= compiles)
        is_over = warm_up.stepped(skipped=steps.num_steps <= skips)
    return steps.num_steps, warm_up.ran_out


@pytest.mark.parametrize(
    ("peaks", "more", "num_steps"),
    [
        ((1000,), {}, 2),
        ((1000,), {"fewest_steps": 7}, 7),
        ((1000,), {"skips": 3}, 5),
        ((1000,), {"compiles": 4}, 6),
        ((1000, 1004, 1008), {}, 2),
        ((1000, 2000, 3000, 3000), {}, 4),
    ],
)
def test_a_warm_up_ends_after_two_calm_steps(clock, peaks, more, num_steps):
    """Without a skip or compiling, with a peak that grows by at most half a percent, and never before it was asked."""
    assert _num_warm_up_steps(clock, FakeCharge(peaks), **more) == (num_steps, False)


def test_a_warm_up_ends_with_a_quarter_of_the_time(clock):
    """0.25 of 0.98 s is over after 25 steps of 10 ms."""
    assert _num_warm_up_steps(clock, FakeCharge(), skips=10**6, options=_options(trial_time_s=0.98)) == (25, True)


def test_epoch_starts_are_not_in_a_window(clock):
    windows = _run(clock, [(0.03, 0.0, 0.0), (0.03, 0.0, 5.0)])
    assert all(w.seconds == pytest.approx(0.06) for w in windows)


def test_waiting_for_data_is_counted_within_the_window(clock):
    windows = _run(clock, [(0.06, 0.045, 0.0)])
    assert all(w.wait_s == pytest.approx(0.045) for w in windows)


def test_what_is_surely_slower_ends_at_the_second_look(clock):
    """533 samples/s, where 600 are to be beaten; looks come after four windows and five."""
    timing = _timing(clock, [CALM], _options(to_beat=600.0))
    assert (len(timing.windows), timing.result()["stopped"]) == (5, "slower")


def test_what_is_surely_slower_when_its_time_is_over_is_called_so(clock):
    """Three windows of 20 s each: 1.6 samples/s."""
    options = _options(trial_time_s=5.0, to_beat=3.0)
    assert _stopped(clock, [(20.0, 0.0, 0.0)], options) == "slower"


def test_what_may_win_is_measured_as_precisely_as_ever(clock):
    """At 540 to beat, 533 is within 2 %."""
    timing = _timing(clock, [CALM], _options(to_beat=540.0))
    assert (len(timing.windows) >= 8, timing.result()["stopped"]) == (True, "precise")


def test_a_race_goes_on_while_the_peak_grows(clock):
    """Up to the seventh window; four are then to be stable, and the next look is after twelve."""
    timing = _timing(clock, [CALM], _options(to_beat=600.0), FakeCharge(range(1000, 9000, 1000)))
    assert (len(timing.windows), timing.result()["stopped"]) == (11, "slower")


def test_what_other_work_took_makes_nothing_surely_slower(clock, others):
    """267 samples/s, of which half the time was taken: it may well reach 400."""
    others(*[0.06] * 1000)
    assert _stopped(clock, [TORN], _options(trial_time_s=2.0, to_beat=400.0)) == "time"
    assert _stopped(clock, [TORN], _options(trial_time_s=2.0, to_beat=600.0)) == "slower"


DRIFTS = [(0.06 * 1.01**number, 0.0, 0.0) for number in range(200)]


def test_an_interval_that_shrinks_no_more_ends_a_trial(clock):
    """Each step takes longer than the one before: the longer it is watched, the wider. What a plan states has its
    time."""
    assert _stopped(clock, DRIFTS, _options(trial_time_s=10.0, may_be_unsure=True)) == "no_surer"
    assert _stopped(clock, DRIFTS, _options(trial_time_s=10.0, may_be_unsure=True, to_beat=1.0)) == "no_surer"
    assert _stopped(clock, DRIFTS, _options(trial_time_s=10.0)) == "time"


class FakeSide:
    """Two turns of 0.2 s; remembers how they went."""

    turn_s, at_rest_s = 0.2, 0.0

    def __init__(self, num_turns=2):
        self.said, self._num_turns = [], num_turns

    def wait(self, samples_per_s=0.0, disturbed=0.0):
        self.said.append(samples_per_s)
        return len(self.said) <= self._num_turns


def test_by_turns_each_has_its_time_and_what_lay_ready_at_its_beginning_is_not_timed(clock, monkeypatch):
    """Of seven steps in a turn, the first and one for each of two batches ahead are not; four of 0.06 s are 0.24 s."""
    monkeypatch.setattr(FakeSteps, "num_ahead", 2)
    steps = FakeSteps(clock, [(0.01, 0.0, 0.0)] * 3 + [(0.06, 0.0, 0.0)] * 4)
    side = FakeSide()
    timing = Timing(steps, FakeCharge(), _options(), side)
    for _ in range(13):
        steps.step()
        assert not timing.stepped()
    steps.step()
    assert timing.stepped()
    assert side.said == [0.0, pytest.approx(32 / 0.06), pytest.approx(32 / 0.06)]
    assert len(timing.windows) == 8


def test_a_turn_that_never_comes_leaves_three_windows(clock):
    """Nobody is there any more to say that it goes on."""
    timing = _timing(clock, [(0.06, 0.0, 0.0)], side=FakeSide(num_turns=0))
    assert (len(timing.windows), timing.result()["stopped"]) == (3, "time")


def test_the_speed_is_that_of_the_calm_windows(clock, others):
    """Half of the windows take twice as long, since other work takes half of them; a third of the time is calm."""
    others(*(0.0, 0.06) * 20)
    found = _timing(clock, [CALM, TORN], _options(precision=1e-9, trial_time_s=3.5)).result()
    assert found["samples_per_s"].value == pytest.approx(32 / 0.06)
    assert found["disturbed"] == 0.0
    assert found["calm"] == pytest.approx(1 / 3)


def test_a_window_is_calm_of_which_other_work_took_less_than_a_twentieth(clock, others):
    others(*(0.0029, 0.0031) * 20)
    found = _timing(clock, [CALM], _options(precision=1e-9, trial_time_s=2.0)).result()
    assert found["calm"] == pytest.approx(0.5, abs=0.02)
    assert found["disturbed"] == pytest.approx(0.0029 / 0.06)


def test_where_few_windows_are_calm_all_count_and_say_what_was_taken(clock, others):
    """Seven calm windows, and forty of which half was taken: 2.4 of 5.22 s."""
    others(*[0.0] * 7, *[0.06] * 40)
    table = [CALM] * 7 + [TORN] * 40
    found = _timing(clock, table, _options(precision=1e-9, trial_time_s=5.2)).result()
    assert found["calm"] == 1.0
    assert found["num_windows"] >= 40
    assert found["disturbed"] == pytest.approx(0.5, abs=0.05)


def test_eight_calm_windows_of_a_hundred_do_not_stand_for_all(clock, others):
    """They hold 0.48 s of 12, and end nothing."""
    others(*(*[0.06] * 12, 0.0) * 8)
    found = _timing(clock, [*[TORN] * 12, CALM], _options(trial_time_s=11.9)).result()
    assert (found["calm"], found["stopped"]) == (1.0, "time")


def test_a_run_lasts_until_the_calm_part_is_known(clock, others):
    """Nothing is looked at while windows are disturbed, however alike; then eight calm ones are, and twice."""
    others(*[0.06] * 30)
    timing = _timing(clock, [TORN] * 30 + [CALM] * 1000)
    assert 30 + 8 < len(timing.windows) < 60
    assert timing.result()["stopped"] == "precise"
    assert timing.result()["samples_per_s"].value == pytest.approx(32 / 0.06)


def test_disturbed_to_its_end_a_run_takes_its_time(clock, others):
    others(*[0.06] * 1000)
    assert _stopped(clock, [TORN], _options(trial_time_s=6.0)) == "time"


def test_on_a_device_of_its_own_all_windows_count(clock, others):
    """That the host waited tells nothing of it; the share is said."""
    others(*(0.0, 0.0625) * 20)
    charge = FakeCharge()
    charge.is_cuda = True
    found = _timing(clock, [(0.0625, 0.0, 0.0)], charge=charge).result()
    assert (found["num_windows"], found["stopped"], found["calm"]) == (10 + 4, "precise", 1.0)  # four were queued
    assert found["disturbed"] == pytest.approx(0.5)


def test_an_epochs_start_is_spread_over_its_samples():
    """300 samples in 3 s; epochs of 100 samples start in 0.5 s: 100 samples take 1.5 s."""
    found = speed_of([Window(1.0, 100, 1, 0.0, 1.0, 1.0)] * 3, 0.5 / 100)
    assert found.value == pytest.approx(100 / 1.5)
    assert found.low <= found.value <= found.high
