"""Runs a batch: each lane of jobs in a thread, their trials by turns; a plan for each job, and a summary."""

from __future__ import annotations

import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import AutotuneError, Caught, Interrupted, NothingFits, OutOfTime, UserError
from ..files import read_text
from ..plain_yaml import read_yaml
from ..plan import Plan, load_plan
from ..searches.driver import search
from ..searches.event_base import Event
from ..searches.events import INTERRUPTED, TaskRead, TrialStarted
from ..searches.reuse import Reuse
from ..searches.store.measurements import Key, Results
from ..searches.time_budget import TimeBudget
from ..workers import Executor, Outcome
from .jobs import SUMMARY, Job, Jobs
from .lane import Inspecting, References, Sharing
from .result import JobResult, write_summary
from .turns import Turn, Turns

_LOOK_S = 0.1
"""Seconds between two looks for free devices and for Ctrl-C."""


@dataclass
class JobRun(JobResult):
    """A job that runs here."""

    where: str = "cpu"
    """The device that it asks for: ``cuda``, or ``cuda:A100``."""
    device_s: float = 0.0
    num_runs: int = 0
    """Processes that it has run on a device, including those that measure nothing."""
    settled: threading.Event = field(default_factory=threading.Event)
    """It has explored everything, unless a finalist is disqualified."""


@dataclass
class Batch:
    """A batch that is under way."""

    lanes: list[list[JobRun]]
    folder: Path
    results: Results
    executors: Mapping[str, Executor]
    """By the device that jobs ask for."""
    turns: Mapping[str, Turns]
    """The same; one for several names of one type."""
    stop: threading.Event
    observe: Callable[[JobRun, Event], None]
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _checked: set[Key] = field(default_factory=set)

    @property
    def jobs(self) -> list[JobRun]:
        """All of them, lane by lane."""
        return [run for lane in self.lanes for run in lane]

    def run(self) -> None:
        """Run every job that is not done, to its end."""
        left = [[run for run in lane if run.state != "done"] for lane in self.lanes]
        first = [(lane, self._join(lane[0])) for lane in left if lane]
        threads = [self._start(self._run_lane, lane[0], lane, turn) for lane, turn in first]
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_LOOK_S / len(threads))
            for turns in self.turns.values():
                if self.stop.is_set():
                    turns.give_back()
                else:
                    turns.advance()
        self.save()

    def save(self) -> None:
        """Write the summary.

        Raises:
            UserError: it cannot be written.
        """
        with self._lock:
            write_summary(self.folder, [run.as_row() for run in self.jobs], devices=self.devices())

    def devices(self) -> list[dict[str, Any]]:
        """For the summary: what each device that has a name had to run, in this process."""
        rows = (row for turns in dict.fromkeys(self.turns.values()) for row in turns.busy().items())
        return [{"name": name, "busy": round(share, 3), "runs": runs} for name, (share, runs) in rows]

    def _join(self, run: JobRun) -> Turn:
        turns = self.turns[run.where]
        turn = Turn(turns, self.executors[run.where], run.job.name, run.job.priority)
        turns.join(turn)
        return turn

    def _start(self, what: Callable[..., None], run: JobRun, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=what, args=args, name=f"autotune-{run.job.name}", daemon=True)
        thread.start()
        return thread

    def _run_lane(self, lane: Sequence[JobRun], turn: Turn) -> None:
        """One job after the other explores; those of one priority then settle their finalists together."""
        references, inspected, threads = References(), dict[str, Outcome](), []
        for number, run in enumerate(lane):
            group = [other for other in lane if other.job.priority == run.job.priority]
            threads.append(
                self._start(self._run_job, run, run, Inspecting(Sharing(turn, references), inspected), turn, group)
            )
            while not run.settled.wait(_LOOK_S):
                pass
            if number + 1 < len(lane):
                if lane[number + 1] not in group:
                    for thread in threads:
                        thread.join()
                turn = self._join(lane[number + 1])
        for thread in threads:
            thread.join()

    def _run_job(self, run: JobRun, executor: Executor, turn: Turn, group: Sequence[JobRun]) -> None:
        """A job that fails stops no other."""
        run.state = "running"
        try:
            with Caught(AutotuneError, frames=True) as bug:  # the outermost frame of this thread
                if self.stop.is_set():
                    raise Interrupted("not begun")
                run.plan = self._search(run, executor, turn, group)
                was_stopped = run.plan.search is not None and run.plan.search.stopped == INTERRUPTED
                run.state, run.why = ("interrupted", "the best so far") if was_stopped else ("done", "")
            if bug.error is not None:
                run.state, run.why = "bug", "".join(traceback.format_exception(bug.take()))
        except (NothingFits, OutOfTime) as error:
            run.state, run.why = "nothing fits", str(error)
        except Interrupted as error:
            run.state, run.why = "interrupted", str(error)
        except AutotuneError as error:
            run.state, run.why = "failed", str(error)
        run.device_s, run.num_runs = turn.device_s, turn.num_runs
        try:
            self.save()
        except UserError as error:
            run.why = " ".join(filter(None, (run.why, str(error))))
        run.settled.set()
        self.turns[run.where].leave(turn)

    def _search(self, run: JobRun, executor: Executor, turn: Turn, group: Sequence[JobRun]) -> Plan:
        options = run.options
        reuse = Reuse(lambda: self.results, options, self.name, self._checked)

        def observe(event: Event) -> None:
            if isinstance(event, TrialStarted) and event.finalist_round is not None and not run.settled.is_set():
                run.settled.set()
                self._wait_for(group, turn)
            if isinstance(event, TaskRead):
                run.device = event.facts.device
            turn.observe(event)
            run.device_s, run.num_runs = turn.device_s, turn.num_runs
            reuse.observe(event)
            self.observe(run, event)

        time_budget = TimeBudget(options.trial_time, options.max_time, turn.clock)
        return search(options, executor, observe, self.stop, time_budget, reuse)

    def _wait_for(self, group: Sequence[JobRun], turn: Turn) -> None:
        """Wait until the other jobs have explored too, so that all finalists run with one reference."""
        turn.park()
        for other in group:
            while not other.settled.wait(_LOOK_S) and not self.stop.is_set():
                pass
        turn.unpark()


def prepare_batch(
    jobs: Jobs,
    folder: Path,
    executors: Mapping[str, Executor],
    results: Results,
    stop: threading.Event,
    resume: bool = False,
    observe: Callable[[JobRun, Event], None] = lambda run, event: None,
    default_device: str = "cpu",
    clock: Callable[[], float] = time.monotonic,
) -> Batch:
    """Make a batch ready to run.

    Args:
        jobs: what is asked for.
        folder: where plans, studies and the summary go.
        executors: by the device that jobs ask for; the caller closes them.
        results: where measurements are kept.
        stop: once set, running trials end and each job writes its best so far.
        resume: leave out what is done, and go on with the studies of the rest. A job that found nothing and asks for
            something else by now begins a study anew, with what is known.
        observe: is told what happens, in the threads of the jobs.
        default_device: of jobs that name none.
        clock: seconds since some moment.

    Raises:
        UserError: the folder cannot be written, or its summary cannot be read.
    """
    try:
        (folder / "studies").mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise UserError(f"{folder}: cannot be made: {reason.strerror}. Choose another folder with -o.") from None
    lanes = [[job_run(job, folder, default_device, resume) for job in lane] for lane in jobs.lanes()]
    earlier = _earlier(folder / SUMMARY) if resume else {}
    for run in (run for lane in lanes for run in lane):
        row = earlier.get(run.job.name, {})
        is_same = row.get("spec") == run.spec
        if row.get("state") == "done" and is_same and run.options.output.exists():
            run.state, run.plan = "done", load_plan(run.options.output)
            run.device_s = row.get("device_s", 0.0)
        elif row.get("state") == "nothing fits" and not is_same:  # a study has one budget
            run.options = run.options.model_copy(update={"resume": False})
    made = {id(executor): Turns(partial(_num_slots, executor), clock) for executor in executors.values()}
    turns = {device: made[id(executor)] for device, executor in executors.items()}
    return Batch(lanes, folder, results, executors, turns, stop, observe)


def _num_slots(executor: Executor) -> int:
    return executor.num_slots


def _earlier(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run's summary, by the jobs' names.

    Raises:
        UserError: it is none.
    """
    try:
        rows = read_yaml(read_text(path, "summary", UserError), str(path), UserError).get("jobs")
    except FileNotFoundError:
        return {}
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise UserError(f"{path}: no summary of a batch. Move it aside, or leave out --resume.")
    return {str(row["name"]): row for row in rows}


def _is_row(row: Any) -> bool:
    """Whether it may be a job's row: what a resume reads of it is there, and of the right kind."""
    is_number = isinstance(row, dict) and isinstance(row.get("device_s", 0.0), int | float)
    return is_number and "name" in row


def job_run(job: Job, folder: Path, default_device: str, resume: bool) -> JobRun:
    """A job that has not begun."""
    return JobRun(job, job.options(folder, default_device, resume), where=job.device or default_device)
