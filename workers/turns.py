"""Two trials that take turns: both live at once, each in a fresh process of its own, and one computes at a time.

Neighbours in time share the machine's load, so that their ratio is known sooner, and better, than from one run after
the other. While one side has its turn, every process of the other is stopped (SIGSTOP).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from ..measure.processes import descendants
from ..measure.timing.turns import GO, SAID, Said, TurnOptions, answer, is_enough
from .outcome import COMPARED, DISTURBED, Lost, Outcome, Turn
from .process import send_signal
from .request import CompareRequest, MeasureRequest
from .scratch import Scratch

_LOOK_S = 0.1
"""How often to look whether a side's trial has ended."""
_MOST_TURNS = 20
"""Pairs of turns, disturbed ones included."""


class _Run(Protocol):
    def __call__(self, request: MeasureRequest, lane: int) -> Outcome:
        """Run a trial beside those of other lanes."""


def take_turns(request: CompareRequest, run: _Run, prefix: str) -> Outcome:
    """Measure both plans of a request by turns.

    Args:
        request: what is compared.
        run: runs one side's trial to its end; it is called in a thread.
        prefix: what the names of folders begin with, as :class:`Scratch` has it.

    Returns:
        :class:`Compared`, with what each side came to; ``Lost`` where what runs trials failed.
    """
    try:
        scratch = Scratch(prefix)
    except OSError as reason:
        return Lost(message=f"{reason.filename}: trials that take turns need a folder: {reason.strerror}.")
    with contextlib.ExitStack() as stack:
        stack.callback(scratch.remove)
        threads = stack.enter_context(ThreadPoolExecutor(2, thread_name_prefix="autotune-turns"))
        sides: list[_Side] = []
        for lane, asked in enumerate((request.one, request.other)):
            folder = scratch.path / str(lane)
            turns = TurnOptions(folder=str(folder), turn_s=request.turn_s)
            options = asked.options.model_copy(update={"turns": turns})
            asked = asked.model_copy(update={"options": options})
            sides.append(_Side(folder, lambda asked=asked, lane=lane: threads.submit(run, asked, lane)))  # type: ignore[misc]
            stack.callback(sides[-1].close)
        return _compare(sides[0], sides[1], request)


def _compare(one: _Side, other: _Side, request: CompareRequest) -> Outcome:
    """Both come to their first turn, then take turns, and end one after the other. On a CUDA device one comes to it
    after the other: kernels that are chosen by their times there are chosen alone."""
    found: list[Turn] = []
    began_s = time.monotonic()
    with contextlib.suppress(_Ended):
        for begun in ((one,), (other,)) if request.device == "cuda" else ((one, other),):
            for side in begun:
                side.begin()
            for side in begun:
                side.wait_until_ready()
        until_s = time.monotonic() + request.most_s
        for side in (one, other):
            side.turn()  # the warm-up, for which each has the processors to itself
        while not _are_enough(found, request.precision) and time.monotonic() < until_s:
            pair = (one, other) if len(found) % 2 == 0 else (other, one)  # a drift counts once forward, once backward
            said = {side: side.turn() for side in pair}
            disturbed = max(each.disturbed for each in said.values())
            found.append(Turn(rates=(said[one].samples_per_s, said[other].samples_per_s), disturbed=disturbed))
    ended = [side.end() for side in (one, other)]
    lost = next((outcome for outcome in ended if isinstance(outcome, Lost)), None)
    both = {"one": ended[0], "other": ended[1]}
    return lost or COMPARED.validate_python({**both, "turns": tuple(found), "seconds": time.monotonic() - began_s})


def _are_enough(turns: Sequence[Turn], precision: float) -> bool:
    """Those that other work disturbed do not count; where most are disturbed, the machine is always so."""
    calm = [turn.log_ratio for turn in turns if turn.disturbed <= DISTURBED]
    return is_enough(calm, precision) or len(turns) >= _MOST_TURNS


class _Ended(Exception):
    """A side's trial has come to its end, whatever that is."""


class _Side:
    """One of the two, as who tells them sees it."""

    def __init__(self, folder: Path, begin: Callable[[], Future[Outcome]]) -> None:
        folder.mkdir()
        self._pipes = {}
        for name in (SAID, GO):
            os.mkfifo(folder / name)
            self._pipes[name] = os.open(folder / name, os.O_RDWR)  # neither end ever waits for the other to open it
        self._begin = begin
        self._trial: Future[Outcome] | None = None
        self._pid: int | None = None
        self._text = ""

    def begin(self) -> None:
        """Start its trial."""
        self._trial = self._begin()

    def wait_until_ready(self) -> None:
        """Wait until its first turn may begin, and stop it until then.

        Raises:
            _Ended: the trial has ended before.
        """
        self._pid = self._hear().pid
        self.stop()

    def turn(self) -> Said:
        """Have it take a turn, and stop it again.

        Raises:
            _Ended: the trial has ended meanwhile.
        """
        self._go(True)
        said = self._hear()
        self.stop()
        return said

    def stop(self) -> None:
        """Stop every process of its tree."""
        stopped: set[int] = set()
        while self._pid is not None and (left := {self._pid, *descendants(self._pid)} - stopped):
            send_signal(left, signal.SIGSTOP)  # those that they start meanwhile are found next
            stopped |= left

    def end(self) -> Outcome | None:
        """Let it come to its end, and wait for that; None where it was never started."""
        self._go(False)
        return self._trial.result() if self._trial is not None else None

    def close(self) -> None:
        """Leave nothing that waits."""
        self._go(False)
        for pipe in self._pipes.values():
            os.close(pipe)

    def _go(self, goes_on: bool) -> None:
        if self._pid is not None:
            send_signal({self._pid, *descendants(self._pid)}, signal.SIGCONT)
        answer(self._pipes[GO], goes_on)

    def _hear(self) -> Said:
        assert self._trial is not None, "it was started"
        while "\n" not in self._text:
            if self._trial.done():
                self._pid = None  # which may be another's by now
                raise _Ended
            if select.select([self._pipes[SAID]], [], [], _LOOK_S)[0]:
                self._text += os.read(self._pipes[SAID], 4096).decode()
        line, _, self._text = self._text.partition("\n")
        return Said.read(line)
