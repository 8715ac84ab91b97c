"""The display of a running search on stderr: a live panel on a terminal, one plain line per event elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..search.events import Event, TrialEnded, Warned
from ..search.options import SearchOptions
from ..units import format_bytes, format_duration
from ..workers import Measured, Outcome, OutOfMemory
from .lines import line, round_words
from .progress import Ended, Progress, finalist_label
from .words import count, over_reference, rate, remark, settings_words, size, times

__all__ = ["Display", "watching"]

_FIXED_ROWS = 14
"""Rows that the panel needs beside the trials' own."""
_BAR_WIDTH = 22
_INTERRUPTED = "Finishing the running trials, then writing the best so far. Ctrl-C again stops at once."


class Display(Protocol):
    """Draws a search. ``interrupted`` may be called from a signal handler: it only sets a flag or writes bytes."""

    def observe(self, event: Event) -> None:
        """Take in what the search says."""

    def interrupted(self) -> None:
        """The first Ctrl-C came."""


@contextmanager
def watching(options: SearchOptions, console: Console) -> Iterator[Display]:
    """A display that lives as long as the search; ``console`` writes to stderr."""
    progress = Progress(options)
    if not console.is_interactive or os.environ.get("NO_COLOR"):
        yield _Lines(progress, console)
        return
    panel = _Panel(progress, console)
    with Live(get_renderable=panel.draw, console=console, refresh_per_second=4) as live:
        panel.live = live
        yield panel


class _Lines:
    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console

    def observe(self, event: Event) -> None:
        self._progress.observe(event)
        with suppress(OSError):  # a reader that has gone, a full disk: the search goes on
            self._console.print(line(event, self._progress), soft_wrap=True, highlight=False, markup=False)

    def interrupted(self) -> None:
        with suppress(OSError):  # a terminal that has gone is one of the interruptions
            os.write(2, f"{_INTERRUPTED}\n".encode())


class _Panel:
    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._interrupted = False
        self.live: Live | None = None

    def observe(self, event: Event) -> None:
        self._progress.observe(event)
        if isinstance(event, Warned):
            self._console.print(Text(f"Note: {event.message}", style="yellow"))
        with suppress(OSError):  # a terminal that has gone: the search goes on
            if self.live is not None:
                self.live.refresh()

    def interrupted(self) -> None:
        self._interrupted = True

    def draw(self) -> RenderableType:
        return draw(self._progress, max(self._console.height - _FIXED_ROWS, 3), self._interrupted)


def draw(progress: Progress, max_rows: int, interrupted: bool = False) -> RenderableType:
    """The whole panel, for a console of any width; at most ``max_rows`` trials."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(ratio=1)
    grid.add_row("trials", _trials(progress))
    if progress.budget.limit is not None:
        grid.add_row("memory", _memory(progress))
    grid.add_row("best", _best(progress))
    if progress.predicting is not None:
        grid.add_row("now", Text(f"predicting memory and work of {count(progress.predicting, 'configuration')}"))
    for running in progress.running:
        words = Text(f"{running.label}, {format_duration(progress.running_s(running))}: ")
        grid.add_row("running", words.append(settings_words(running.settings, progress.facts)))
    if interrupted:
        grid.add_row("", Text(_INTERRUPTED, style="yellow"))
    title = f"autotune · {progress.options.task} · {format_duration(progress.elapsed_s)}"
    parts: list[RenderableType] = [Rule(Text(title), align="left", characters="─"), grid]
    if progress.ended:
        parts += [Text(), _history(progress, max_rows)]
    return Group(*parts, Text())  # the cursor rests on the last row, where a terminal echoes ^C


def _trials(progress: Progress) -> RenderableType:
    words = f"{progress.num_trials_ended} of {progress.num_trials}"
    if progress.finalist_round is not None:
        words += f" · finalists, {round_words(*progress.finalist_round)}"
    elif progress.stopped is not None:
        words += f" · {progress.stopped}"
    elif (left := progress.trials_left_s) is not None:
        words += f" · about {format_duration(left)} left, then finalists"
    elif progress.facts is None:
        words += " · reading the task"
    return _bar(progress.num_trials_ended, progress.num_trials, Text(words))


def _memory(progress: Progress) -> RenderableType:
    limit = progress.budget.limit or 1
    measured = progress.best[1] if progress.best else progress.reference
    if measured is None:
        return _bar(0, limit, Text(f"budget {format_bytes(limit)}"))
    peak = measured.peak.process
    whose = "best so far" if progress.best else "reference"
    fits = progress.budget.holds(peak)
    words = Text(f"{size(peak)} of {format_bytes(limit)}, {whose}", style="" if fits else "red")
    return _bar(peak, limit, words, "green" if fits else "red")


def _best(progress: Progress) -> RenderableType:
    if progress.best is None:
        return Text("nothing that fits yet", style="dim")
    settings, measured = progress.best
    words = Text(f"{rate(measured.samples_per_s.value)} samples/s", style="bold green")
    if progress.reference is not None:
        words.append(over_reference(measured, progress.reference))
    return Group(words, Text(settings_words(settings, progress.facts)))


def _bar(done: float, whole: float, words: Text, style: str = "cyan") -> RenderableType:
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(
        total=whole, completed=min(done, whole), width=_BAR_WIDTH, complete_style=style, finished_style=style
    )
    row.add_row(bar, words)
    return row


def _history(progress: Progress, max_rows: int) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(width=len(finalist_label(0)), style="dim", no_wrap=True)
    for heading in ("samples/s", "10.00x", "1023 MiB"):
        table.add_column(width=len(heading), no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_row("", Text("samples/s", style="dim"), "", Text("memory", style="dim"), "")
    shown = progress.ended[-max_rows:][::-1]
    common = _common_words(shown, progress)
    for ended in shown:
        speed, ratio, peak = _figures(ended.event.outcome, progress)
        said = remark(ended.event.outcome, progress.budget)
        parts = settings_words(ended.settings, progress.facts).split(", ")
        rest = ", ".join(part for part in parts if part not in common)
        words = Text((f"{said}: " if rest else said) if said else "", style="red").append(rest, style="dim")
        style = "bold green" if isinstance(ended.event, TrialEnded) and ended.event.is_best else ""
        table.add_row(ended.label, *(Text(figure, style=style) for figure in (speed, ratio, peak)), words)
    return table


def _common_words(shown: Sequence[Ended], progress: Progress) -> set[str]:
    """What all rows of a table would say alike: a narrow terminal has room for what tells them apart."""
    said = [set(settings_words(ended.settings, progress.facts).split(", ")) for ended in shown]
    return set.intersection(*said) if len(said) > 1 else set()


def _figures(outcome: Outcome, progress: Progress) -> tuple[str, str, str]:
    """Samples/s, the ratio to the reference, and memory, where there are such."""
    if isinstance(outcome, OutOfMemory):
        return "", "", size(outcome.peak_bytes)
    if not isinstance(outcome, Measured):
        return "", "", ""
    value = outcome.measurement.samples_per_s.value
    ratio = times(value / progress.reference.samples_per_s.value) if progress.reference else ""
    return rate(value), ratio, size(outcome.measurement.peak.process)
