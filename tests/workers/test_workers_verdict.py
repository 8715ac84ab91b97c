"""What a trial's end means, and how little of its files is believed."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys

import pytest
import torch

from autotune.measure import MeasureOptions
from autotune.measure.measurement import Parity
from autotune.measure.timing.compile_time import CompileTime
from autotune.plan import Budget, Plan
from autotune.techniques import Settings
from autotune.workers import Crashed, Failed, Lost, MeasureRequest, OutOfMemory, TimedOut
from autotune.workers.process import ProcessId, end, identify, is_alive
from autotune.workers.protocol import receive, send
from autotune.workers.trial import child
from autotune.workers.trial.environment import trial_environment
from autotune.workers.trial.folder import TrialFolder
from autotune.workers.trial.spawn import Child
from autotune.workers.trial.supervise import Capture, Ending, Limits, supervise
from autotune.workers.trial.verdict import verdict

REQUEST = MeasureRequest(
    id="1",
    task="model.py",
    device="cpu",
    plan=Plan(settings=Settings(), budget=Budget(limit=2**30)),
    options=MeasureOptions(parity_batch=8),
)
KILLED = int(signal.SIGKILL)  # as os.wait4 gives it
FAILED = Failed(message="RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ")


@pytest.fixture
def folder(tmp_path):
    return TrialFolder(tmp_path)


def ending(**changes):
    known = {"status": 0, "ended_for": None, "peak_bytes": 2**20, "oom_killed": False, "seconds": 1.5, "output": "hi\n"}
    return Ending(**{**known, **changes})


def test_an_answer_gets_its_output_and_its_seconds(folder):
    folder.write_outcome(Failed(message="no"))
    assert verdict(REQUEST, folder, ending()) == Failed(message="no", output="hi\n", seconds=1.5)


def test_a_half_written_answer_is_none(folder):
    folder.write_outcome(Failed(message="no"))
    answer = folder.path / "outcome.json"
    answer.write_bytes(answer.read_bytes()[:-2])
    assert isinstance(verdict(REQUEST, folder, ending()), Crashed)


def test_a_whole_answer_stands_even_where_the_process_was_ended_after_it(folder):
    folder.write_outcome(Failed(message="no"))
    assert isinstance(verdict(REQUEST, folder, ending(status=KILLED, ended_for="deadline")), Failed)


def test_a_kill_is_out_of_memory_only_on_the_kernels_word(folder):
    assert isinstance(verdict(REQUEST, folder, ending(status=KILLED)), Crashed)
    outcome = verdict(REQUEST, folder, ending(status=KILLED, oom_killed=True))
    assert isinstance(outcome, OutOfMemory)
    assert outcome.peak_bytes == 2**20


def test_a_loader_worker_that_the_kernel_killed_for_memory_is_out_of_memory(folder):
    folder.write_outcome(FAILED)
    assert isinstance(verdict(REQUEST, folder, ending()), Failed)
    assert isinstance(verdict(REQUEST, folder, ending(oom_killed=True)), OutOfMemory)


def test_a_trial_without_a_stack_says_so(folder):
    folder.write_phase("training")
    outcome = verdict(REQUEST, folder, ending(status=KILLED, ended_for="deadline"))
    assert isinstance(outcome, TimedOut)
    assert outcome.message == "ended while training; its Python stack could not be had"


def test_a_trial_that_stood_stopped_says_nothing_of_its_configuration(folder):
    folder.write_phase("training")
    outcome = verdict(REQUEST, folder, ending(status=KILLED, ended_for="stopped"))
    assert isinstance(outcome, Lost)
    assert outcome.message == "a trial was stopped (SIGSTOP) while training, and nobody continued it"


def test_only_what_is_printed_first_and_last_is_kept():
    reader, writer = os.pipe()
    capture = Capture(reader)
    for byte in (b"a", b"b", b"c"):
        os.write(writer, byte * 32 * 1024)
        assert capture.read() == 32 * 1024
    assert capture.read() is None
    os.close(writer)
    assert capture.read() == 0
    os.close(reader)
    assert capture.text() == "a" * 32768 + "\n[... 32768 bytes left out ...]\n" + "c" * 32768


def test_a_message_of_any_length_crosses_and_half_of_one_is_none():
    ours, theirs = socket.socketpair()
    with ours:
        send(ours, "short")
        assert receive(theirs) == "short"
        ours.sendall(struct.pack("!I", 100) + b"half")
    with theirs:
        assert receive(theirs) is None


def test_a_process_with_another_start_time_is_a_stranger():
    me = identify(os.getpid())
    stranger = ProcessId(me.pid, me.start - 1)
    assert is_alive(me)
    assert not is_alive(stranger)
    end([stranger])  # were it not a stranger, this test would not go on


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")
def test_a_process_whose_name_is_no_text_is_told_apart_too():
    """As one that a task has started may be."""
    program = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\\xff) Z', 0, 0, 0); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert is_alive(identify(process.pid))
        process.communicate()
    assert identify(process.pid) is None


def test_the_requests_variables_come_last_and_rays_not_at_all():
    request = REQUEST.model_copy(update={"environment": {"OMP_NUM_THREADS": "4"}})
    base = {"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "01", "HOME": "/home/user"}
    assert trial_environment(request, base) == {"OMP_NUM_THREADS": "4", "HOME": "/home/user"}


def test_a_trial_is_no_rank():
    """Of a shell, or of torchrun with one process: a task that looks for them would wait for peers."""
    base = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert trial_environment(REQUEST, {**base, "TORCHELASTIC_RUN_ID": "none", "HOME": "/root"}) == {"HOME": "/root"}


def supervised(compiled_s, most_s):
    """How a process ends that waits for its input, which ``compiled_s`` may close."""
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=writer) as own:
        os.close(writer)
        limits = Limits(0.05, None, compiled_s=lambda: compiled_s(own), most_compiling_s=most_s)
        return supervise(Child(own.pid, reader), limits, theirs)


def test_compiling_puts_a_deadline_off_by_what_it_takes():
    """A trial that is seen to compile at its deadline comes to its end by itself; with its most seconds of that it is
    ended all the same, which is said."""
    ended = supervised(lambda own: own.stdin.close() or 3600.0, 7200.0)
    assert (ended.ended_for, ended.put_off_s) == (None, 3600.0)
    assert os.WIFEXITED(ended.status)
    late = supervised(lambda own: 3600.0, 0.05)
    assert (late.ended_for, late.put_off_s) == ("deadline", 0.05)


def test_what_was_put_off_is_said(folder):
    outcome = verdict(REQUEST, folder, ending(status=KILLED, ended_for="deadline", put_off_s=40.0))
    assert outcome.deadline_s == 640.0
    assert outcome.message.startswith("ended, put off by 40 s for compiling, while starting")


@pytest.mark.medium
def test_a_trial_says_how_long_it_compiles(folder):
    """What :class:`CompileTime` counts; while it compiles, the seconds go on."""
    time, seen = CompileTime(folder.write_compiling), []
    assert folder.read_compiled_s() == 0.0
    torch.compile(lambda x: x + 1, backend=lambda graph, _: seen.append(folder.read_compiled_s()) or graph)(
        torch.ones(2)
    )
    assert 0.0 < seen[0] < folder.read_compiled_s() == time.seconds()


COMPILED = """
import torch
from torch.utils.data import TensorDataset
build_model = lambda: torch.nn.Linear(4, 1)
build_dataset = lambda: TensorDataset(torch.ones(32, 4))
batch_size = 8
@torch.compile(backend="eager")
def compute_loss(model, batch):
    return model(batch[0]).mean()
"""


@pytest.mark.medium
def test_a_trial_notes_what_compiling_takes_and_lets_graphs_go_before_it_compares_losses(folder, monkeypatch):
    """Graphs' memory would stay allocated next to that of the model that is applied anew."""
    events = []
    monkeypatch.setattr("torch._inductor.cudagraph_trees.reset_cudagraph_trees", lambda: events.append("let go"))
    monkeypatch.setattr(child, "run_parity", lambda *asked: events.append("compare") or Parity(losses=(1.0,)))
    task = folder.path / "model.py"
    task.write_text(COMPILED)
    options = MeasureOptions(trial_time_s=0.1, parity_batch=8, parity_last=True)
    request = REQUEST.model_copy(update={"task": str(task), "options": options, "plan": Plan(settings=Settings())})
    outcome = child._run(request, folder, 0.0)
    assert events == ["let go", "compare"]
    assert outcome.measurement.compile_s > 0.0
    assert folder.read_compiled_s() > 0.0
