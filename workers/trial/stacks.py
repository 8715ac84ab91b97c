"""The Python stack of a trial, written where its supervisor looks: as the process crashes, or as that asks for it."""

from __future__ import annotations

import faulthandler
import io
import signal
import sys
from typing import IO

from .folder import TrialFolder


def write_stacks_to(folder: TrialFolder) -> IO[str]:
    """Have the stack written from here on; what is printed comes line by line."""
    stack = folder.open_stack()
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what was printed before a crash is not lost
    return stack
