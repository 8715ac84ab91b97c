"""Signals: how many end the running trials, and that a command's exit code is its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from command_line import environment

from autotune.commands.interrupts import interrupts

ENDS = """
import os, signal, sys
from autotune.commands.interrupts import interruptible

BOTH = (signal.SIGTERM, signal.SIGINT)

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=BOTH):  # Python has put its own handlers away by now
        for number in numbers:
            kill(pid, number)

late = Late()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
try:
    with interruptible():
        signal.pthread_sigmask(signal.SIG_BLOCK, BOTH)
        for number in BOTH:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BOTH)
except KeyboardInterrupt:
    print("interrupted once")
    sys.exit(130)
"""


def test_two_signals_in_a_row_are_one_interruption_and_later_ones_change_no_exit_code():
    ended = subprocess.run([sys.executable, "-c", ENDS], env=environment(), capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "interrupted once\n", "")


@pytest.fixture
def signals(monkeypatch):
    """As a program has them that nobody started in the background, where a shell has Ctrl-C ignored."""
    monkeypatch.setattr("autotune.commands.interrupts._PATIENCE_S", 0.2)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ended(*numbers: signal.Signals, within_s: float) -> bool:
    """Whether signals end trials that run on and on."""
    stop, closed = threading.Event(), threading.Event()
    with interrupts(stop, closed.set, interrupted=lambda: False):
        for number in numbers:
            os.kill(os.getpid(), number)
        found = closed.wait(within_s)
        assert stop.is_set()
    return found


def test_one_ctrl_c_waits_for_trials_and_two_end_them(signals):
    assert not ended(signal.SIGINT, within_s=0.5)
    assert ended(signal.SIGINT, signal.SIGINT, within_s=600)


def test_sigterm_ends_trials_that_do_not_end_soon(signals):
    """Who sends it asks once, and kills soon: a script's first trial may have ten minutes."""
    assert ended(signal.SIGTERM, within_s=600)
