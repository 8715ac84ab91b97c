"""Measuring by turns: when enough turns were taken, and a trial that stands stopped."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys

import pytest

from autotune.measure.timing.turns import GO, SAID, Said, Side, TurnOptions, answer, is_enough, trimmed_mean
from autotune.workers.outcome import Turn
from autotune.workers.trial import supervise


def test_what_a_side_says_crosses_whole():
    said = Said(1234, 567.25, 0.125)
    assert Said.read(said.line()) == said


def test_a_side_that_was_told_to_end_waits_no_more(tmp_path):
    """The other has failed as it was started: this one is told so before its warm-up, and no answer comes after."""
    for name in (SAID, GO):
        os.mkfifo(tmp_path / name)
    pipes = [os.open(tmp_path / name, os.O_RDWR) for name in (SAID, GO)]
    side = Side(TurnOptions(folder=str(tmp_path)))
    answer(pipes[1], True)
    answer(pipes[1], False)
    assert [side.wait() for _ in range(3)] == [True, False, False]
    for pipe in pipes:
        os.close(pipe)


def test_a_turn_is_the_one_over_the_other():
    assert math.exp(Turn(rates=(300.0, 200.0)).log_ratio) == pytest.approx(1.5)


def test_turns_that_agree_are_enough_after_four():
    assert not is_enough([0.5] * 3, 0.03)
    assert is_enough([0.5] * 4, 0.03)


def test_turns_go_on_until_the_ratio_is_known():
    """3 % is log(1.03) = 0.0296. Half the interval is 1.96 times 0.0365 / sqrt(4) = 0.0358 after four. After six, of
    which the first and the fourth are left out, it is 1.96 times 0.0219 * sqrt(5 / 12) = 0.0277."""
    ratios = [0.46, 0.48, 0.52, 0.54, 0.48, 0.52]
    assert not is_enough(ratios[:4], 0.03)
    assert is_enough(ratios, 0.03)


def test_a_machine_that_changes_its_speed_within_two_turns_does_not_change_the_ratio():
    """Seen on a shared machine: 0.078, then 0.471. The other four are 0.272, 0.310, 0.235 and 0.246, whose mean is
    0.26575; winsorized to 0.235 and 0.310 the standard deviation is 0.0352."""
    value, error = trimmed_mean([0.272, 0.310, 0.078, 0.471, 0.235, 0.246])
    assert value == pytest.approx(0.26575)
    assert error == pytest.approx(0.0352 * math.sqrt(5 / 12), rel=0.01)
    assert trimmed_mean([0.2, 0.3, 0.4, 0.9]) == (pytest.approx(0.45), pytest.approx(0.31091 / 2, rel=1e-3))
    assert trimmed_mean([0.4]) == (0.4, 0.0)


def test_turns_end_where_ten_would_not_do():
    """Standard deviation 0.110 of six: half the interval would be 0.068 after ten."""
    ratios = [0.4, 0.6] * 3
    assert not is_enough(ratios[:5], 0.03)
    assert is_enough(ratios, 0.03)


@pytest.mark.medium
@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_trial_that_is_stopped_and_that_nobody_continues_is_ended(monkeypatch, takes_turns):
    """But not one that takes turns: who stopped it continues it, and else it has its deadline."""
    monkeypatch.setattr(supervise, "_STOPPED_INTERVAL_S", 0.05)
    monkeypatch.setattr(supervise, "_MOST_STOPPED_S", 0.1)
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=writer) as own:
        os.close(writer)
        os.kill(own.pid, signal.SIGSTOP)
        limits = supervise.Limits(deadline_s=1.0, memory_bytes=None, takes_turns=takes_turns)
        watch = supervise._Watch(supervise.Child(own.pid, reader), limits, ours)
        status, _ = watch.until_exit()
        watch.close()
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert watch.ended_for == ("deadline" if takes_turns else "stopped")
