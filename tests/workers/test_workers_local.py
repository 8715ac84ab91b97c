"""The local executor holds the contract."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.measure import MeasureOptions
from autotune.plan import Budget, Plan
from autotune.pruning import Record
from autotune.techniques import Settings
from autotune.techniques.allocator import Allocator
from autotune.techniques.batch import Batch
from autotune.techniques.models.pruning import Pruning
from autotune.testing.executors import IsolationContract
from autotune.workers import Crashed, Failed, Lost, Measured
from autotune.workers.local import LocalExecutor, LocalSlot
from autotune.workers.outcome import OUTCOME
from autotune.workers.protocol import receive, send


class TestLocalExecutor(IsolationContract):
    tasks = Path(__file__).parents[1] / "tasks"
    executor_class = LocalExecutor

    @pytest.fixture
    def executor(self, local_executor):
        return local_executor

    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch):
        """A trial that was lost is tried again without the pause in which a disk may be cleared."""
        monkeypatch.setattr("autotune.workers.pool._PAUSES_S", (0.0, 0.0))

    def test_a_trial_says_what_was_decided_as_its_plan_was_applied(self, executor):
        """A cut is found in a child of the trial; its record, which has half of the hidden layer, comes back."""
        plan = Plan(settings=Settings(pruning=Pruning(kind="structured", ratio=0.5)))
        outcome = executor.submit(self.request("healthy", plan=plan)).result()
        assert isinstance(outcome, Measured), outcome
        pruning = outcome.applied.pruning
        assert Record.unpacked(pruning.kept, pruning.record).tensors["0.bias"].shape == (8,)
        again = executor.submit(self.request("healthy", plan=Plan(settings=outcome.applied))).result()
        assert again.applied is None
        assert again.measurement.parity.losses == outcome.measurement.parity.losses

    @pytest.mark.slow
    def test_two_take_turns_on_one_processor_too(self, folder):
        """Nothing hangs, and nothing is left."""
        whole = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(whole)})
        try:
            with LocalExecutor() as executor:
                outcome = self.compare(executor, folder)
        finally:
            os.sched_setaffinity(0, whole)
        assert isinstance(outcome.one, Measured), outcome.one
        assert len(outcome.turns) >= 4

    @pytest.mark.slow
    def test_where_the_system_cannot_watch_forks_a_trial_is_a_new_interpreter(self, folder, tmp_path):
        """A fork server without pidfd: same protocol, by polling."""
        program = (
            "import os, sys\n"
            "from pathlib import Path\n"
            "del os.pidfd_open\n"
            "from autotune.workers.trial.fork_server import main\n"
            "main(int(sys.argv[1]), Path(sys.argv[2]))\n"
        )
        ours, theirs = socket.socketpair()
        (tmp_path / "server").mkdir()
        with ours, theirs:
            command = [sys.executable, "-P", "-c", program, str(theirs.fileno()), tmp_path / "server"]
            server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            send(ours, self.request("describes_itself", folder).model_dump_json(by_alias=True))
            assert isinstance(OUTCOME.validate_json(receive(ours)), Measured)
        assert server.wait() == 0
        assert "autotune.workers.trial.child" in json.loads((folder / "about.json").read_text())["ancestors"][0]

    def test_a_fork_server_that_cannot_start_is_lost_and_says_why(self):
        with LocalExecutor() as executor:
            outcome = self.run(executor, "healthy", environment={"PYTHONHOME": "/nowhere"})
        assert isinstance(outcome, Lost), outcome
        assert outcome.message.startswith("the fork server ended with code 1: ")
        assert "encodings" in outcome.message

    def test_without_a_folder_for_temporary_files_a_trial_is_lost_and_the_folder_named(self, monkeypatch, tmp_path):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
        with LocalExecutor() as executor:
            outcome = self.run(executor, "healthy")
        assert isinstance(outcome, Lost), outcome
        assert outcome.message.startswith(f"{tmp_path}/gone/autotune-")
        assert "No such file or directory. Make room there, or name another folder with TMPDIR." in outcome.message

    @pytest.mark.slow
    @pytest.mark.parametrize("fresh", [False, True])
    def test_without_a_working_folder_a_trial_is_lost_and_the_folder_named(self, folder, tmp_path, fresh):
        """A fresh interpreter could not start there, which says nothing of the configuration."""
        (tmp_path / "work").mkdir()
        slot = LocalSlot(os.environ, str(tmp_path / "work"))
        request = self.request("healthy", folder, fresh=fresh)
        try:
            assert isinstance(slot.run(request), Measured)
            (tmp_path / "work").rmdir()
            outcome = slot.run(request)
        finally:
            slot.close()
        assert isinstance(outcome, Lost), outcome
        assert outcome.message.startswith(f"{tmp_path}/work (deleted): trials run in this folder, and it is gone.")

    @pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
    def test_a_plan_whose_own_environment_ends_every_process_has_crashed(self, tmp_path, monkeypatch):
        """A preloaded allocator that takes the fork server down: that is the configuration's."""
        library = tmp_path / "libaborts.so"
        source = "#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }"
        compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
        subprocess.run(compiler, input=source, text=True, check=True)
        monkeypatch.setattr("autotune.techniques.allocator._find", lambda kind: str(library))
        plan = Plan(settings=Settings(allocator=Allocator(kind="tcmalloc")))
        with LocalExecutor() as executor:
            assert isinstance(self.run(executor, "healthy", plan=plan), Crashed)

    @pytest.mark.slow
    def test_parity_does_not_raise_the_peak_of_a_smaller_batch(self, executor):
        """Steps of 32 in pieces of 8 hold 64 MiB of gradients beside 64 MiB of activations; steps of 8 never do."""
        peaks, losses = [], []
        for last in (True, False):
            options = MeasureOptions(trial_time_s=0.2, parity_batch=32, parity_last=last)
            plan = Plan(settings=Settings(batch=Batch(micro=8)), budget=Budget(limit=2**40))
            outcome = executor.submit(self.request("free_batch", plan=plan, options=options)).result()
            peaks.append(outcome.measurement.peak.process)
            losses.append(outcome.measurement.parity.losses)
        assert losses[0] == losses[1]
        assert len(losses[0]) == 10
        assert peaks[1] - peaks[0] > 32 * 2**20

    def test_losses_are_compared_of_what_may_win(self, executor):
        for to_beat, num_losses in ((1e12, 0), (1e-6, 10)):
            options = MeasureOptions(trial_time_s=0.2, parity_batch=8, to_beat=to_beat)
            found = executor.submit(self.request("healthy", options=options)).result().measurement
            assert len(found.parity.losses) == num_losses
            assert {"load", "apply", "parity", "warmup", "timed", "evaluation", "leak"} == found.phases_s.keys()

    def test_an_allocator_that_is_not_installed_is_a_failure_with_the_remedy(self, executor, monkeypatch):
        monkeypatch.setattr("autotune.techniques.allocator._find", lambda kind: None)
        outcome = self.run(executor, "healthy", plan=Plan(settings=Settings(allocator=Allocator(kind="jemalloc"))))
        assert isinstance(outcome, Failed)
        assert "apt-get install libjemalloc2" in outcome.message
