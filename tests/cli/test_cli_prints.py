"""What a task prints reaches those who ask for it, and a search that reads a task is never silent."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from command_line import start

QUICK = ("--executor", "local", "--device", "cpu", "--trials", "1", "--trial-time", "0.2s", "--space", "space.yaml")
PRINTS = """
import healthy
from healthy import *

def build_model():
    print("the model is built \\x1b[31m")
    return healthy.build_model()
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "prints.py").write_text(PRINTS)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("one_round")
def test_every_process_of_a_search_has_a_log_and_verbose_shows_them(folder, here):
    """The inspection's, too. A terminal's escapes are not passed on."""
    ended = here("search", "prints.py", *QUICK, "--verbose", "-o", "found.yaml", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    for name in ("inspect", "trial-000", "finalist-000-round-1"):
        assert f"{name} | the model is built \\x1b[31m\n" in ended.stderr
        assert "the model is built" in (folder / ".autotune" / "prints-1" / f"{name}.log").read_text()
    assert ended.stderr.count("is kept in .autotune/prints-1/*.log") == 1
    table = r"^Where .* went\n  starting .*\n  reading .*\n  reference .*: .*timed \d"
    assert re.search(table, ended.stderr, re.MULTILINE)
    assert ended.stdout == "found.yaml\n"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("command", "names"),
    [
        (("profile", "prints.py", "--alone"), ("inspect", "profile")),
        (("estimate", "prints.py", "--space", "space.yaml"), ("inspect", "estimate-1")),
        (("search", "prints.py", *QUICK, "--dry-run"), ("inspect",)),
    ],
)
def test_other_commands_show_prints_where_they_are_asked_to(folder, here, command, names):
    ended = here(*command, "--verbose", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    for name in names:
        assert f"{name} | the model is built" in ended.stderr


@pytest.mark.medium
def test_without_verbose_nothing_of_it_is_shown(folder, here):
    assert "the model is built" not in here("search", "prints.py", *QUICK, "--dry-run", cwd=folder).stderr


def test_a_failure_shows_what_the_task_had_printed_last(folder, here):
    (folder / "fails.py").write_text(PRINTS.replace("return", "raise ValueError('no model')\n    return"))
    ended = here("search", "fails.py", *QUICK, cwd=folder)
    assert ended.returncode == 2
    assert "ValueError: no model" in ended.stderr
    assert "Its last output:\nthe model is built" in ended.stderr


@pytest.mark.medium
def test_a_dry_run_says_at_once_what_it_does(folder, here):
    ended = here("search", "healthy.py", *QUICK, "--dry-run", cwd=folder)
    assert ended.stderr.startswith("[0 s] reading the task: healthy.py\n")
    assert "likely " in ended.stdout


TRAINS = "import threading\nbuild_model = build_dataset = compute_loss = print\nthreading.Event().wait()\n"
"""A script that trains where it is imported."""


@pytest.mark.slow
def test_a_dry_run_says_what_it_does_still(folder):
    (folder / "trains.py").write_text(TRAINS)
    running = start("search", "trains.py", *QUICK, "--dry-run", cwd=folder)
    running.read_until("still reading the task, ")
    running.process.send_signal(signal.SIGINT)
    ended = running.finish()
    assert (ended.returncode, ended.left_behind) == (130, [])


@pytest.mark.slow
def test_ctrl_c_while_a_task_is_read_stops_at_once_and_says_so(folder):
    """There is nothing to finish."""
    (folder / "trains.py").write_text(TRAINS)
    running = start("search", "trains.py", *QUICK, cwd=folder)
    before = running.read_until("still reading the task")
    assert before.startswith("[0 s] reading the task: trains.py\n")
    running.process.send_signal(signal.SIGINT)
    ended = running.finish()
    assert (ended.returncode, ended.stdout, ended.left_behind) == (130, "", [])
    assert ended.stderr.startswith("Stopping: the task was still being read, and nothing had been measured.\n")
    assert "Finishing the running trials" not in ended.stderr
