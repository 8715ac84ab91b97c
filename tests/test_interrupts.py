"""Signals while a command ends: its exit code is its own."""

from __future__ import annotations

import subprocess
import sys

from command_line import environment

ENDS = """
import os, signal, sys
from autotune.interrupts import interruptible

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
