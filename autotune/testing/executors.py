"""What every executor must do. Subclass a contract in a test, give it an ``executor``, and inherit its tests."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest

from ..measure import MeasureOptions
from ..measure.processes import descendants
from ..plan import Budget, Plan
from ..techniques import Settings
from ..techniques.allocator import Allocator, installed_allocators
from ..techniques.precision import Precision
from ..units import MIB
from ..workers import CompareRequest, Executor, InspectRequest, MeasureRequest
from ..workers.outcome import (
    Compared,
    Crashed,
    Failed,
    Inspected,
    Lost,
    Measured,
    NonFinite,
    Outcome,
    OutOfMemory,
    TimedOut,
)
from ..workers.process import ProcessId, identify, is_alive

_PATIENCE_S = 60.0
_BUSY_S = 600.0
"""For what has to come: a machine may be busy with other work."""


class ExecutorContract:
    """Any executor, a table's included. Overrides: the ``executor`` fixture, and ``tasks``."""

    tasks: ClassVar[Path]
    """A folder with ``healthy.py`` and the ``hostile_*.py`` tasks."""

    @pytest.fixture
    def executor(self) -> Executor:
        """The executor under test."""
        raise NotImplementedError

    def request(self, name: str, folder: Path | None = None, **changes: Any) -> MeasureRequest:
        """A short measuring request for a task of ``tasks``, or of a copy of it; ``changes`` replace its fields."""
        fields: dict[str, Any] = {
            "id": name,
            "task": str((folder or self.tasks) / f"{name}.py"),
            "device": "cpu",
            "plan": Plan(settings=Settings()),
            "options": MeasureOptions(trial_time_s=0.2, parity_batch=8),
            "deadline_s": _BUSY_S,
        }
        return MeasureRequest(**{**fields, **changes})

    def test_a_measure_request_is_answered_with_a_measurement(self, executor: Executor) -> None:
        """A task that does everything right comes back measured."""
        outcome = executor.submit(self.request("healthy")).result()
        assert isinstance(outcome, Measured), outcome
        assert outcome.measurement.samples_per_s.value > 0
        assert outcome.measurement.peak.process > 0

    def test_an_inspect_request_is_answered_with_facts(self, executor: Executor) -> None:
        """No plan is needed to inspect a task."""
        request = InspectRequest(id="inspect", task=str(self.tasks / "healthy.py"), device="cpu")
        outcome = executor.submit(request).result()
        assert isinstance(outcome, Inspected), outcome
        assert outcome.facts.device.type == "cpu"

    def test_requests_of_one_slot_end_in_the_order_they_came(self, executor: Executor) -> None:
        """First come, first served."""
        assert executor.num_slots == 1
        ended: SimpleQueue[str] = SimpleQueue()
        futures = [executor.submit(self.request("healthy", id=str(number))) for number in range(3)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: ended.put(str(number)))  # type: ignore[misc]
        assert [ended.get() for _ in futures] == ["0", "1", "2"]  # a result may be had before it is told


class Pids:
    """A named pipe that hostile tasks write pids to, so that a test waits for them without polling."""

    def __init__(self, path: Path) -> None:
        """Make the pipe."""
        os.mkfifo(path)
        self._pipe = os.open(path, os.O_RDWR)
        self._text = ""

    def read(self, count: int) -> list[ProcessId]:
        """The next ``count`` processes that said their pid, all alive."""
        until_s = time.monotonic() + _BUSY_S
        while self._text.count("\n") < count:
            if not select.select([self._pipe], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise TimeoutError(f"{count} pids were expected within {_BUSY_S:.0f} s, but got {self._text!r}")
            self._text += os.read(self._pipe, 4096).decode()
        *pids, self._text = self._text.split("\n", count)
        return [process for process in map(identify, map(int, pids)) if process is not None]

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._pipe)


def wait_for_end(processes: list[ProcessId]) -> list[ProcessId]:
    """Wait until they have ended; those that have not within a minute."""
    until_s = time.monotonic() + _PATIENCE_S
    for process in processes:
        try:
            ended = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        if is_alive(process):
            select.select([ended], [], [], max(0.0, until_s - time.monotonic()))
        os.close(ended)
    return [process for process in processes if is_alive(process)]


class IsolationContract(ExecutorContract):
    """An executor that runs each trial in a process of its own. Overrides also ``executor_class``."""

    executor_class: ClassVar[type[Executor]]
    """Opened without arguments where a test needs an executor of its own."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A copy of the tasks, for those that write beside themselves."""
        return Path(shutil.copytree(self.tasks, tmp_path / "tasks"))

    @pytest.fixture
    def pids(self, folder: Path) -> Iterator[Pids]:
        """What hostile tasks in the folder write pids to."""
        pids = Pids(folder / "pids")
        yield pids
        pids.close()

    def about(self, executor: Executor, folder: Path, **changes: Any) -> dict[str, Any]:
        """What a trial says of the process that it runs in."""
        outcome = self.run(executor, "describes_itself", folder, **changes)
        assert isinstance(outcome, Measured), outcome
        described: dict[str, Any] = json.loads((folder / "about.json").read_text())
        return described

    def run(self, executor: Executor, name: str, folder: Path | None = None, **changes: Any) -> Outcome:
        """One trial's outcome."""
        return executor.submit(self.request(name, folder, **changes)).result()

    def compare(self, executor: Executor, folder: Path) -> Compared:
        """Two trials by turns, the one in bfloat16. As in a search's rounds, no losses are compared, which would be
        before the first turn."""
        bf16, options = Plan(settings=Settings(precision=Precision(kind="bf16"))), self.request("takes_turns").options
        own = {"options": options.model_copy(update={"parity_batch": None})}
        one, other = (self.request("takes_turns", folder, plan=p, **own) for p in (bf16, Plan(settings=Settings())))
        request = CompareRequest.of(one, other, _PATIENCE_S).model_copy(update={"turn_s": 0.2})
        outcome = executor.submit(request).result()
        assert isinstance(outcome, Compared), outcome
        return outcome

    def test_of_two_that_take_turns_one_computes_at_a_time(self, executor: Executor, folder: Path) -> None:
        """A step of the one is over before one of the other begins, the warm-up's too; both took several turns."""
        outcome = self.compare(executor, folder)
        assert isinstance(outcome.one, Measured), outcome.one
        assert isinstance(outcome.other, Measured), outcome.other
        assert len(outcome.turns) >= 4
        logs = [path.read_text().split("\n")[:-1] for path in folder.glob("steps-*")]
        steps = sorted((*map(float, line.split()), side) for side, lines in enumerate(logs) for line in lines)
        assert len(logs) == 2
        assert sum(one[2] != next_[2] for one, next_ in pairwise(steps)) >= 4
        assert all(one[1] <= next_[0] for one, next_ in pairwise(steps) if one[2] != next_[2])

    def test_of_two_that_take_turns_one_that_fails_as_it_starts_leaves_no_turn(
        self, executor: Executor, folder: Path
    ) -> None:
        """The other, which was started beside it, goes on alone to its end."""
        (folder / "raises-at-once").touch()
        outcome = self.compare(executor, folder)
        assert isinstance(outcome.one, Failed), outcome.one
        assert isinstance(outcome.other, Measured), outcome.other
        assert outcome.turns == ()

    def test_of_two_that_take_turns_one_that_is_killed_leaves_the_other_measured(
        self, executor: Executor, folder: Path
    ) -> None:
        """It is continued, and comes to its end."""
        (folder / "dies-later").touch()
        outcome = self.compare(executor, folder)
        assert isinstance(outcome.one, Crashed), outcome.one
        assert isinstance(outcome.other, Measured), outcome.other

    def test_an_exception_comes_back_with_the_users_traceback_alone(self, executor: Executor) -> None:
        """The frames of this package are left out; the task's is there."""
        outcome = self.run(executor, "hostile_raises")
        assert isinstance(outcome, Failed), outcome
        assert outcome.message == "IndexError: list index out of range"
        assert 'hostile_raises.py", line 8, in build_model' in outcome.traceback
        assert outcome.traceback.count('  File "') == 1

    def test_an_exception_in_a_loader_worker_comes_back_with_the_workers_last_line(self, executor: Executor) -> None:
        """What the sample's reader raised, not that a worker raised it."""
        outcome = self.run(executor, "hostile_worker_raises")
        assert isinstance(outcome, Failed), outcome
        assert outcome.message == "ValueError: sample 7 is broken"
        assert "in __getitem__" in outcome.traceback

    def test_a_task_error_has_no_traceback(self, executor: Executor) -> None:
        """The message says all."""
        outcome = self.run(executor, "hostile_empty_dataset")
        assert isinstance(outcome, Failed), outcome
        assert "empty dataset" in outcome.message
        assert outcome.traceback == ""

    def test_sys_exit_is_a_failure_of_the_task(self, executor: Executor) -> None:
        """It ends neither the server nor the driver."""
        outcome = self.run(executor, "hostile_exits")
        assert isinstance(outcome, Failed), outcome
        assert outcome.message == "the task called sys.exit(3)"

    def test_an_exit_behind_pythons_back_is_a_crash_with_its_code(self, executor: Executor) -> None:
        """``os._exit`` leaves no answer."""
        outcome = self.run(executor, "hostile_exits_at_once")
        assert isinstance(outcome, Crashed), outcome
        assert outcome.message.startswith("exited with code 4 and without an answer")

    def test_a_segmentation_fault_comes_back_with_the_python_stack(self, executor: Executor) -> None:
        """Named by its signal, with the line of the task that it happened in."""
        outcome = self.run(executor, "hostile_segfault")
        assert isinstance(outcome, Crashed), outcome
        assert outcome.message.startswith("Segmentation fault (SIGSEGV) while training\n")
        assert 'hostile_segfault.py", line 9 in compute_loss' in outcome.message

    def test_a_hang_ends_at_the_deadline_and_says_where_it_hung(self, executor: Executor) -> None:
        """The stack is asked for before the trial is killed; what was printed is kept."""
        for deadline_s in (2.0, 8.0, 32.0, 128.0):  # on a busy machine it comes to its loss later
            outcome = self.run(executor, "hostile_hang", deadline_s=deadline_s)
            if outcome.output:
                break
        assert isinstance(outcome, TimedOut), outcome
        assert outcome.deadline_s == deadline_s
        assert 'hostile_hang.py", line 10 in compute_loss' in outcome.message
        assert outcome.output == "about to hang\n"

    def test_a_loss_that_is_not_a_number_is_an_outcome_of_its_own(self, executor: Executor) -> None:
        """With the step that it came at."""
        outcome = self.run(executor, "hostile_nan")
        assert isinstance(outcome, NonFinite), outcome
        assert outcome.step == 3

    def test_a_flood_of_output_is_kept_at_both_ends_only(self, executor: Executor) -> None:
        """64 MiB were printed: the first and last 32 KiB, and a line between them, come back."""
        outcome = self.run(executor, "hostile_prints")
        assert isinstance(outcome, Measured), outcome
        assert outcome.output.startswith("the first line\n")
        assert outcome.output.endswith("the last line\n")
        assert 64 * 1024 < len(outcome.output) < 65 * 1024

    def test_a_trial_that_is_killed_from_outside_is_a_crash(self, executor: Executor) -> None:
        """SIGKILL without the kernel's word that memory ran out."""
        outcome = self.run(executor, "hostile_kills_itself")
        assert isinstance(outcome, Crashed), outcome
        assert outcome.message.startswith("Killed (SIGKILL) while training")

    def test_the_watchdog_ends_a_trial_over_its_memory_limit(self, executor: Executor) -> None:
        """A budget of 1 GiB: ended past 1.25 GiB, well before the machine's memory is gone."""
        plan = Plan(settings=Settings(), budget=Budget(limit=1024 * MIB))
        outcome = self.run(executor, "hostile_eats_memory", plan=plan)
        assert isinstance(outcome, OutOfMemory), outcome
        assert outcome.peak_bytes > 1280 * MIB
        assert "the watchdog's limit of 1280 MiB" in outcome.message

    def test_processes_that_a_trial_leaves_behind_are_ended_with_it(
        self, executor: Executor, folder: Path, pids: Pids
    ) -> None:
        """A child, and a daemon that took a session of its own."""
        future = executor.submit(self.request("hostile_leaves_processes", folder))
        left = pids.read(2)
        assert isinstance(future.result(), Measured)
        assert [process for process in left if is_alive(process)] == []

    def test_closing_every_file_descriptor_loses_no_answer(self, executor: Executor) -> None:
        """Nor does a forked copy of the trial that comes back into our code answer for it."""
        assert isinstance(self.run(executor, "hostile_closes_files"), Measured)

    def test_a_fork_server_that_was_killed_is_started_again(self, executor: Executor, folder: Path) -> None:
        """The trial is asked again, and its outcome comes as if nothing had happened."""
        assert isinstance(self.kill_above(executor, folder, generations=1), Measured)

    def kill_above(self, executor: Executor, folder: Path, generations: int) -> Outcome:
        """The outcome of a trial that kills a process above it once: 1 is its server, 2 what started that."""
        (folder / "generations").write_text(str(generations))
        outcome = self.run(executor, "hostile_kills_its_parents", folder)
        assert not (folder / "generations").exists()
        return outcome

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("hostile_kills_its_server", "the fork server was killed (SIGKILL)"),
            ("hostile_cannot_answer", "the trial's files cannot be kept there: No space left on device"),
            ("hostile_cleans_up", "the trial's files cannot be kept there: No such file or directory"),
            ("hostile_fills_a_disk", "OSError: [Errno 28] No space left on device"),
        ],
    )
    def test_what_the_environment_does_is_lost_and_the_next_trial_runs(
        self, executor: Executor, name: str, said: str
    ) -> None:
        """A killed server, a full disk and a removed folder are no crash of the configuration's."""
        outcome = self.run(executor, name)
        assert isinstance(outcome, Lost), outcome
        assert said in outcome.message
        assert isinstance(self.run(executor, "healthy"), Measured)

    def test_a_fresh_trial_starts_as_a_job_would(self, executor: Executor, folder: Path) -> None:
        """A new interpreter with the request's variables, its plan's, none of Ray's; no terminal, no signal blocked."""
        installed = "tcmalloc" in installed_allocators()
        plan = Plan(settings=Settings(allocator=Allocator(kind="tcmalloc" if installed else "system")))
        about = self.about(executor, folder, plan=plan, fresh=True, environment={"OMP_NUM_THREADS": "2"})
        trial, server, *_ = about["ancestors"]
        assert "autotune.workers.trial.child" in trial
        assert "autotune.workers.trial.fork_server" in server
        assert about["num_threads"] == 2
        assert ("libtcmalloc" in about["libraries"]) is installed
        assert [name for name in about["environment"] if name.startswith("RAY_")] == []
        assert about["argv"] == [str(folder / "describes_itself.py")]
        assert about["stdin"] == ""
        assert about["blocked_signals"] == 0

    def test_a_forked_trial_is_the_first_to_go_when_memory_runs_out(self, executor: Executor, folder: Path) -> None:
        """Before its server and the driver; and it leads a session of its own."""
        about = self.about(executor, folder)
        assert about["oom_score_adj"] == 1000
        assert about["session_leader"] is True

    def test_close_ends_every_process_at_once(self, folder: Path, pids: Pids) -> None:
        """A hanging trial, what it left behind, and the server; its future, and one that waited, get ``Crashed``."""
        executor = self.executor_class()
        hang = self.request("hostile_hang_with_processes", folder, fresh=True)
        futures = [executor.submit(hang), executor.submit(hang)]
        started = pids.read(3)
        executor.close()
        outcomes = [future.result() for future in futures]
        assert outcomes == [Crashed(message="stopped: the executor was closed")] * 2
        assert [process for process in started if is_alive(process)] == []

    def test_nothing_outlives_a_driver_that_was_killed(self, folder: Path, pids: Pids) -> None:
        """SIGKILL to the driver in the middle of a trial: every process that came of it ends by itself."""
        hang = self.request("hostile_hang_with_processes", folder)
        program = (
            f"from {self.executor_class.__module__} import {self.executor_class.__name__} as Executor\n"
            "from autotune.workers import REQUEST\n"
            f"Executor().submit(REQUEST.validate_json({hang.model_dump_json(by_alias=True)!r})).result()\n"
        )
        driver = subprocess.Popen([sys.executable, "-P", "-c", program], start_new_session=True)
        started = pids.read(3)
        started += [process for process in map(identify, descendants(driver.pid)) if process is not None]
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        assert len(started) >= 4
        assert wait_for_end(started) == []
