"""The display of a running batch on stderr, and the table of what came of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..batch.result import JobResult
from ..batch.run import Batch, JobRun
from ..results import PreviewedJob
from ..searches.budget import asked, limits_words
from ..searches.event_base import Event
from ..searches.events import TrialStarted, Warned
from ..searches.options import SearchOptions
from ..searches.time_budget import NUM_REPEATS
from ..searches.winner.unlike import MOST_PLANS
from ..units import format_duration, size
from ..words import count, rate, roughly, times
from .displays.lines import line, phase_words
from .displays.progress import Progress
from .printing import tell

_STYLES = {"done": "green", "failed": "red", "bug": "red", "nothing fits": "red", "interrupted": "yellow"}
_FIXED_ROWS = 6
_RUNNING_FIRST = ("running", "waiting")


class Watch:
    """Draws a batch; its jobs tell it what happens from threads of their own."""

    def __init__(self, console: Console) -> None:
        self.batch: Batch | None = None
        self._console = console
        self._progress: dict[str, Progress] = {}
        self._lock = threading.Lock()
        self._is_live = console.is_interactive and not os.environ.get("NO_COLOR")
        self._interrupted = ""

    def observe(self, run: JobRun, event: Event) -> None:
        """Take in what a job says."""
        with self._lock:
            progress = self._progress.setdefault(run.job.name, Progress(run.options))
            progress.observe(event)
            words = f"{run.job.name} {line(event, progress)}"
        # what draws holds the terminal's lock when it asks for ours
        if isinstance(event, Warned) and self._is_live:
            self._console.print(Text.assemble((f"{run.job.name}: ", "yellow"), event.message))
        elif not self._is_live and not isinstance(event, TrialStarted):
            tell(words)

    def interrupted(self) -> bool:
        """The first Ctrl-C came: running trials end."""
        self._interrupted = (
            "Finishing the running trials, then writing each job's best so far. Ctrl-C again stops at once."
        )
        if not self._is_live:
            tell(self._interrupted)
        return False

    @contextmanager
    def drawing(self, batch: Batch) -> Iterator[None]:
        """Draw as long as the body runs."""
        self.batch = batch
        if not self._is_live:
            tell(f"{count(len(batch.jobs), 'job')} on {_devices(batch)}")
            yield
            return
        with Live(get_renderable=self.draw, console=self._console, refresh_per_second=2):
            yield

    def draw(self) -> RenderableType:
        """All jobs, those first that run; the first few where they are many."""
        assert self.batch is not None
        with self._lock:
            jobs = sorted(self.batch.jobs, key=lambda run: run.state not in _RUNNING_FIRST)
            shown = jobs[: max(self._console.height - _FIXED_ROWS, 3)]
            num_done = sum(run.state not in _RUNNING_FIRST for run in jobs)
            used = format_duration(sum(run.device_s for run in jobs))
            title = f"autotune batch · {num_done} of {count(len(jobs), 'job')} · {used} of {_devices(self.batch)}"
            rows = [(run, self._now(run)) for run in shown]
            rule = Rule(Text(title), align="left", characters="─", style="bright_black")
            parts: list[RenderableType] = [rule, _table(rows)]
            if len(shown) < len(jobs):
                parts.append(Text(f"and {len(jobs) - len(shown)} more", style="dim"))
            if self._interrupted:
                parts.append(Text(self._interrupted, style="bold"))
            return Group(*parts, Text())

    def _now(self, run: JobRun) -> str:
        progress = self._progress.get(run.job.name)
        if run.state != "running" or progress is None:
            return run.why.split("\n")[0]
        if (phase := phase_words(progress)) is not None:
            return phase
        best = "" if progress.best is None else f", best {rate(progress.best[1].samples_per_s.value)} samples/s"
        doing = "finalists" if progress.finalist_round is not None else f"{progress.num_trials_ended} trials"
        return f"{doing}{best}"


def outcome_table(jobs: Sequence[JobResult]) -> RenderableType:
    """What came of each job."""
    return _table([(run, run.why.split("\n")[0] or str(run.options.output)) for run in jobs])


def _table(rows: Sequence[tuple[JobResult, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("job", "budget", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("trials", "known", "gain", "memory", "device time"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("", ratio=1, overflow="ellipsis")
    for run, words in rows:
        found = run.plan.search if run.plan else None
        gain = run.plan.gain.speed if run.plan and run.plan.gain else None
        measured = run.plan.measured if run.plan else None
        table.add_row(
            run.job.name,
            _budget(run.options),
            Text(run.state, style=_STYLES.get(run.state, "")),
            str(found.trials) if found else "",
            str(found.known or "") if found else "",
            times(gain) if gain else "",
            size(measured.peak.process) if measured else "",
            format_duration(run.device_s) if run.device_s else "",
            Text(words, no_wrap=True),  # the only one that gives way on a narrow terminal
        )
    return table


def explain_previews(found: Sequence[PreviewedJob]) -> RenderableType:
    """What a batch would do: trials, time of a device, and what is known already."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("job", "budget"):
        table.add_column(heading, no_wrap=True)
    for heading in ("configurations", "known", "trials, likely", "device time, likely"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("", ratio=1)
    low = high = 0.0
    for one in found:
        words = _budget(one.options)
        if one.preview is None:
            table.add_row(one.options.stem, words, "", "", "", "", one.why)
            continue
        expected = one.preview.expected
        low, high = low + expected.low_s, high + expected.high_s
        known = f"{one.num_known}" if one.num_known else ""
        time = _range(expected.low_s, expected.high_s)
        likely = str(one.preview.num_likely)
        table.add_row(one.options.stem, words, str(one.preview.num_configurations), known, likely, time, one.why)
    total = f"In all likely {_range(low, high)} of a device, the best again in fresh processes included."
    return Group(table, Text(), Text(total))


def explain_sharing(found: Sequence[PreviewedJob], ranks: Mapping[str, int], effective: int) -> RenderableType:
    """What one training over unlike devices would do: a search on each type, and the shares.

    Args:
        found: the searches.
        ranks: processes of the training, by the device that they are on.
        effective: samples in an optimizer step, of all of them.
    """
    processes = ", ".join(f"{number} x {device}" for device, number in ranks.items())
    words = (
        f"All types are searched at once. Then the shares of {effective} samples for {sum(ranks.values())} processes "
        f"({processes}) are measured: {NUM_REPEATS} to {NUM_REPEATS * MOST_PLANS} runs in fresh processes on each type."
    )
    return Group(explain_previews(found), Text(words))


def _budget(options: SearchOptions) -> str:
    """``8 GiB``, or ``90%``: in a narrow table without what it is a share of."""
    return limits_words(asked(options)).replace(" of the reference's peak", "")


def _range(low_s: float, high_s: float) -> str:
    low, high = roughly(low_s), roughly(high_s)
    return low if low == high else f"{low} to {high}"


def _devices(batch: Batch) -> str:
    """``2 devices (cuda)``."""
    slots = {turns: (device, batch.executors[device].num_slots) for device, turns in batch.turns.items()}
    names = ", ".join(device for device, _ in slots.values())
    return f"{count(sum(number for _, number in slots.values()), 'device')} ({names})"
