"""One line for each event of a search: plain ones, for pipes and logs; of JSON, for programs (``--progress``)."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ...errors import UserError
from ...searches.event_base import Event
from ...searches.events import TrialEnded
from ...searches.options import SearchOptions
from ...units import format_duration
from ...words import count
from .progress import Progress

_LONG_TRIAL_S = 30.0
"""A trial that has run for so long is said to run still."""
_LONG_READING_S = 30.0
"""A task that takes so long to be read may be a script that trains where it is imported."""


def line(event: Event, progress: Progress) -> str:
    """What an event says, after ``progress`` has taken it in."""
    return f"[{format_duration(progress.elapsed_s)}] {event.words(progress)}{_more(event, progress)}"


def opening(progress: Progress) -> str:
    """What is said before anything has happened."""
    options = progress.options
    whose = f": {options.task}" if options.command is None else ""
    return f"[{format_duration(progress.elapsed_s)}] {_reading(options)}{whose}"


def _reading(options: SearchOptions) -> str:
    """A task file is read; a script is run until it has shown what it trains."""
    return "reading the task" if options.command is None else f"running {options.task} up to its third optimizer step"


def phase_words(progress: Progress) -> str | None:
    """What is done beside trials, and for how long; None where nothing is."""
    seconds = progress.phase_s
    if seconds is None:
        return None
    if progress.predicting is not None:
        configurations = count(progress.predicting, "configuration")
        return f"predicting the memory and work of {configurations}, {format_duration(seconds)}"
    words = f"{_reading(progress.options)}, {format_duration(seconds)}"
    if seconds > _LONG_READING_S and progress.options.command is None:
        does = "run" if progress.options.inference else "train"
        words += f": does it {does} where it is imported? Move that under `if __name__ == '__main__':`"
    return words


def still(progress: Progress) -> str | None:
    """What is still done, where nothing was said for a while; None where it has only begun."""
    words = phase_words(progress)
    if words is not None:
        words = f"still {words}"
    else:
        long = [each for each in progress.running if progress.running_s(each) >= _LONG_TRIAL_S]
        words = ", ".join(
            f"{each.event.label} still runs, {format_duration(progress.running_s(each))}" for each in long
        )
    return f"[{format_duration(progress.elapsed_s)}] {words}" if words else None


def _more(event: Event, progress: Progress) -> str:
    """After the reference, how long the search likely goes on, where nobody has said how long it may."""
    is_first = isinstance(event, TrialEnded) and event.number == 0 and event.outcome.kind == "measured"
    if not is_first or progress.options.max_time is not None:
        return ""
    left_s, trial_s = progress.left_s, progress.trial_s
    if left_s is None or trial_s is None:
        return ""
    trials = count(progress.likely_trials, "trial")
    again = "by turns with the reference" if progress.by_turns else "in fresh processes"
    more = f"about {format_duration(left_s)} more: some {trials} of {format_duration(trial_s)}"
    return f"; {more}, then the best again {again}"


class EventFile:
    """Appends what happens, each line at once: what follows the file sees whole lines, whatever becomes of the search.

    An object has ``event`` (its kind), ``time`` (seconds since 1970) and what the kind has; sizes are bytes.
    """

    def __init__(self, path: Path, options: SearchOptions) -> None:
        """Open it.

        Raises:
            UserError: it cannot be written.
        """
        self._progress = Progress(options)
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as reason:
            raise UserError(
                f"--progress {path}: it cannot be written: {reason.strerror}. Choose another file."
            ) from None

    def observe(self, event: Event) -> None:
        """Append an event. A full disk ends no search: the line is lost."""
        self._progress.observe(event)
        row = {"event": event.kind, "time": time.time(), **event.row(self._progress)}
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError:
            pass
