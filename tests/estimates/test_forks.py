"""Questions that are answered in forks of a process: in order, with its errors, and leaving nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.estimates import forks
from autotune.estimates.forks import in_forks


@pytest.fixture(autouse=True)
def _two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "num_processors", lambda: 2)


def test_answers_come_in_order_from_other_processes():
    answers = list(in_forks(lambda number: (number, os.getpid()), range(5)))
    assert [number for number, _ in answers] == list(range(5))
    assert os.getpid() not in {pid for _, pid in answers}


def test_one_question_is_answered_here():
    assert list(in_forks(lambda _: os.getpid(), [0])) == [os.getpid()]


def test_a_process_that_has_opened_cuda_answers_all_itself(monkeypatch: pytest.MonkeyPatch):
    """In a fork of it each would fail ("Cannot re-initialize CUDA in forked subprocess") and be asked once more."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert list(in_forks(lambda _: os.getpid(), range(3))) == [os.getpid()] * 3


def test_an_error_is_the_one_that_it_would_have_been():
    """Of a class that no other process could have sent."""

    class OddError(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(f"{first} {second}")

    def fails(number: int) -> int:
        if number:
            raise OddError("not", "like this")
        return number

    with pytest.raises(OddError, match="not like this"):
        list(in_forks(fails, range(3)))


def test_what_a_fork_that_was_killed_owes_is_answered_here():
    here = os.getpid()

    def dies(number: int) -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert list(in_forks(dies, range(3))) == [0, 1, 2]


def test_kernels_run_in_a_fork_of_a_process_in_which_they_have_run_in_several_threads():
    """A fork has none of those threads, and computes in one."""
    num_before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(2**20).sum()
        found = list(in_forks(lambda _: (torch.ones(2**20).sum().item(), torch.get_num_threads()), "ab"))
    finally:
        torch.set_num_threads(num_before)
    assert found == [(2**20, 1)] * 2


_KILLED = """
import os, time
from autotune.estimates import forks
forks.num_processors = lambda: 2
def waits(_):
    os.write(1, b"here\\n")
    time.sleep(600)
list(forks.in_forks(waits, "ab"))
"""


@pytest.mark.medium
def test_forks_end_with_a_process_that_is_killed():
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen([sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        for _ in range(2):
            parent.stdout.readline()
        parent.kill()
        assert parent.communicate(timeout=600.0)[0] == ""  # nobody is left who could write
