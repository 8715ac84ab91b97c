"""The display of a running search on stderr: a live panel on a terminal, one plain line per event elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ...searches.event_base import Event, RunEnded
from ...searches.events import TrialEnded, Warned
from ...searches.options import SearchOptions
from ...units import format_bytes, format_duration, size
from ...words import finalist_label, over_reference, rate, remark, round_words, settings_words, times
from ...workers import Measured, Outcome, OutOfMemory
from .lines import line, opening, phase_words, still
from .progress import Progress

_FIXED_ROWS = 14
"""Rows that the panel needs beside the trials' own."""
_BAR_WIDTH = 22
_BEST, _WRONG = "bold green", "red"
"""Styles of rows; those of all others are plain, and only labels and headings are dim."""
_PATIENCE_S = 5.0
"""So long nothing is said before a plain line says what is still done; then twice as long, and so on."""


class Display(Protocol):
    """Draws a search. ``interrupted`` may be called from a signal handler: it only sets a flag or writes bytes."""

    def observe(self, event: Event) -> None:
        """Take in what the search says."""

    def interrupted(self) -> bool:
        """The first Ctrl-C came: says what it does. True where nothing runs whose end is worth waiting for."""


@contextmanager
def watching(options: SearchOptions, console: Console) -> Iterator[Display]:
    """A display that lives as long as the search; ``console`` writes to stderr."""
    if not console.is_interactive or os.environ.get("NO_COLOR"):
        with saying(options, console) as lines:
            yield lines
        return
    panel = _Panel(Progress(options), console)
    with Live(get_renderable=panel.draw, console=console, refresh_per_second=4) as live:
        panel.live = live
        yield panel


def saying(options: SearchOptions, console: Console) -> AbstractContextManager[Display]:
    """A display of plain lines on any console, with a sign of life where nothing is said for long."""
    return _Lines(Progress(options), console)


class _Lines:
    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._is_over = False
        self._heard = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="still", daemon=True)

    def __enter__(self) -> _Lines:
        self._say(opening(self._progress))
        self._beats.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over = True
        self._heard.set()
        self._beats.join()

    def observe(self, event: Event) -> None:
        self._progress.observe(event)
        self._say(line(event, self._progress))
        self._heard.set()

    def interrupted(self) -> bool:
        with suppress(OSError):
            os.write(2, f"{_interrupted(self._progress)}\n".encode())
        return self._progress.is_idle()

    def _say(self, words: str) -> None:
        with suppress(OSError):  # a reader that has gone, a full disk: the search goes on
            self._console.print(words, soft_wrap=True, highlight=False, markup=False)

    def _beat(self) -> None:
        """A sign of life where nothing else is said for long."""
        patience_s = _PATIENCE_S
        while not self._is_over:
            if self._heard.wait(patience_s):
                self._heard.clear()
                patience_s = _PATIENCE_S
            else:
                patience_s *= 2
                if (words := still(self._progress)) is not None:
                    self._say(words)


class _Panel:
    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._interrupted: str | None = None
        self.live: Live | None = None

    def observe(self, event: Event) -> None:
        self._progress.observe(event)
        if isinstance(event, Warned):
            self._console.print(Text.assemble(("Note: ", "yellow"), event.message))
        with suppress(OSError):  # a terminal that has gone: the search goes on
            if self.live is not None:
                self.live.refresh()

    def interrupted(self) -> bool:
        self._interrupted = _interrupted(self._progress)
        return self._progress.is_idle()

    def draw(self) -> RenderableType:
        return draw(self._progress, max(self._console.height - _FIXED_ROWS, 3), self._interrupted)


def _interrupted(progress: Progress) -> str:
    """What the first Ctrl-C does."""
    if progress.facts is None:
        return "Stopping: the task was still being read, and nothing had been measured."
    if progress.is_idle():
        return "Stopping the prediction, then writing the best so far. Ctrl-C again stops at once."
    return "Finishing the running trials, then writing the best so far. Ctrl-C again stops at once."


def draw(progress: Progress, max_rows: int, interrupted: str | None = None) -> RenderableType:
    """The whole panel, for a console of any width; at most ``max_rows`` trials, and what a Ctrl-C does once it came."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(ratio=1)
    grid.add_row("trials", _trials(progress))
    if progress.budget.of_device is not None:
        grid.add_row("memory", _memory(progress))
    grid.add_row("best", _best(progress))
    if (doing := phase_words(progress)) is not None:
        grid.add_row("now", Text(doing))
    for running in progress.running:
        words = Text(f"{running.event.label}, {format_duration(progress.running_s(running))}: ")
        grid.add_row("running", words.append(settings_words(running.event.settings, progress.facts)))
    if interrupted is not None:
        grid.add_row("", Text(interrupted, style="bold"))
    title = f"autotune · {progress.options.task} · {format_duration(progress.elapsed_s)}"
    parts: list[RenderableType] = [Rule(Text(title), align="left", characters="─", style="bright_black"), grid]
    if progress.ended:
        parts += [Text(), _history(progress, max_rows)]
    return Group(*parts, Text())  # the cursor rests on the last row, where a terminal echoes ^C


def _trials(progress: Progress) -> RenderableType:
    words = f"{progress.num_trials_ended} of {progress.num_trials}"
    if progress.finalist_round is not None:
        words += f" · finalists, {round_words(*progress.finalist_round)}"
        words += ": unsure, another runs" if progress.is_unsure else ""
    elif progress.stopped is not None:
        words += f" · {progress.stopped}"
    if (left := progress.left_s) is not None:
        words += f" · about {format_duration(left)} left" + ("" if progress.finalist_round else ", finalists included")
    return _bar(progress.num_trials_ended, progress.num_trials, Text(words))


def _memory(progress: Progress) -> RenderableType:
    limit = progress.budget.of_device or 1
    measured = progress.best[1] if progress.best else progress.reference
    if measured is None:
        return _bar(0, limit, Text(f"budget {format_bytes(limit)}"))
    peak = measured.peak.process
    whose = "best so far" if progress.best else "reference"
    fits = (progress.budget.of_job(peak) if measured is progress.reference else progress.budget).holds(peak)
    over = "" if fits else ": over the budget"
    words = Text(f"{size(peak)} of {format_bytes(limit)}, {whose}{over}", style="" if fits else "red")
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
        total=whole,
        completed=min(done, whole),
        width=_BAR_WIDTH,
        style="bright_black",  # rich's own is as dark as text on a light background
        complete_style=style,
        finished_style=style,
    )
    row.add_row(bar, words)
    return row


def _history(progress: Progress, max_rows: int) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    longest = max(len(finalist_label(0)), *(len(ended.label) for ended in progress.ended[-max_rows:]))
    table.add_column(width=longest, style="dim", no_wrap=True)
    for heading in ("samples/s", "10.00x", "1023 MiB"):
        table.add_column(width=len(heading), no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_row("", Text("samples/s", style="dim"), "", Text("memory", style="dim"), "")
    shown = progress.ended[-max_rows:][::-1]
    common = _common_words(shown, progress)
    for ended in shown:
        speed, ratio, peak = _figures(ended.outcome, progress)
        parts = settings_words(ended.settings, progress.facts).split(", ")
        rest = ", ".join(part for part in parts if part not in common)
        said, style = _verdict(ended, progress)
        words = Text.assemble((f"{said}: " if rest else said, style), rest) if said else Text(rest)
        figures = style if style == _BEST else ""
        table.add_row(ended.label, *(Text(figure, style=figures) for figure in (speed, ratio, peak)), words)
    return table


def _verdict(ended: RunEnded, progress: Progress) -> tuple[str, str]:
    """What a row is marked with, and its style: the words say it, too, where there are no colours. Most are not."""
    wrong = remark(ended.outcome, ended.held_to(progress.budget))
    if wrong is not None:
        return wrong, _WRONG
    is_best = progress.best is not None and progress.best[0] == ended.settings
    return ("best so far", _BEST) if is_best and isinstance(ended, TrialEnded) else ("", "")


def _common_words(shown: Sequence[RunEnded], progress: Progress) -> set[str]:
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
