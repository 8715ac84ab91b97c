"""Where output goes wrong: closed, full and narrow streams lose text, and nothing else."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import ONE_ROUND, PROGRAM, Ended, environment

SEARCH = "search healthy.py --executor local --trials 1 --trial-time 0.2s --space space.yaml"
"""Of the job as it stands, with which nothing takes turns."""
PLAN = "schema: autotune/plan@1\nsettings: {}\nnotes: ['[/nope] [bold]…[/bold]']\n"


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "plan.yaml").write_text(PLAN)
    return folder


def shell(
    folder: Path, command: str, program: tuple[str, ...] = PROGRAM, **extra: str
) -> subprocess.CompletedProcess[str]:
    """``autotune`` with a shell's redirections behind it."""
    line = ["bash", "-o", "pipefail", "-c", f"{shlex.join(program)} {command}"]
    return subprocess.run(line, cwd=folder, env=environment(**extra), capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>&1 | head -n 2"])
def test_a_search_goes_on_without_its_streams(folder: Path, closed: str):
    """Daemons have none, readers go: the plan is written."""
    done = shell(folder, f"{SEARCH} -o found.yaml {closed}", ONE_ROUND)
    assert done.returncode == 0, done.stderr
    assert "measured:" in (folder / "found.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full"])
def test_what_is_lost_on_stderr_changes_nothing_on_stdout(folder: Path, closed: str):
    done = shell(folder, f"{SEARCH} --dry-run {closed}")
    assert done.returncode == 0
    assert "likely " in done.stdout


@pytest.mark.medium
def test_stdout_that_is_full_is_said(folder: Path):
    done = shell(folder, "show plan.yaml >/dev/full")
    assert done.returncode == 2
    assert done.stderr == "What was to be printed could not be written: No space left on device.\n"


@pytest.mark.medium
def test_a_reader_that_has_had_enough_is_no_error(folder: Path):
    assert shell(folder, "show plan.yaml | true").stderr == ""


@pytest.mark.medium
def test_text_that_a_terminal_has_no_letters_for_is_replaced(folder: Path):
    done = shell(folder, "show plan.yaml", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_users_brackets_are_a_users_brackets(folder: Path, here: Callable[..., Ended]):
    assert "[/nope] [bold]…[/bold]" in here("show", "plan.yaml", cwd=folder).stdout
    document = json.loads(here("show", "plan.yaml", "--json", cwd=folder).stdout)
    assert document["plan"]["notes"] == ["[/nope] [bold]…[/bold]"]


HOSTILE = "\\e]0;owned\\a \\e[2J \\u009B31m \\u202Eevil\\u2066"
"""In YAML's escapes: a title, a cleared screen, a C1 sequence, and marks that turn text around."""


@pytest.fixture
def hostile(folder: Path) -> Path:
    (folder / "plan.yaml").write_text(
        "schema: autotune/plan@1\nsettings: {}\n"
        f'task: {{source: "{HOSTILE}.py", fingerprint: "sha256:{"0" * 64}"}}\n'
        f'notes: ["{HOSTILE}"]\n'
        "measured: {samples_per_s: {value: 1.0, low: 0.9, high: 1.1}, peak: {process: 1 MiB}}\n"
        f'gain: {{speed: null, memory: null, reason: "{HOSTILE}"}}\n'
        f'environment: {{torch: "{HOSTILE}", device: "{HOSTILE}", driver: "{HOSTILE}", autotune: "1", python: "3"}}\n'
        f'search: {{trials: 1, seconds: 1, stopped: "{HOSTILE}", study: "{HOSTILE}", sampler: "{HOSTILE}", seed: 0}}\n'
    )
    return folder


def acted_on(text: str) -> set[str]:
    return {each for each in text if not each.isprintable() and each != "\n"}


def test_a_terminal_shows_a_plan_and_does_nothing_that_it_says(hostile: Path, here: Callable[..., Ended]):
    done = here("show", "plan.yaml", cwd=hostile, COLUMNS="400")
    assert (done.returncode, acted_on(done.stdout)) == (0, set())
    assert done.stdout.count(r"\x1b[2J \x9b31m \u202eevil\u2066") >= 5


def test_a_document_says_the_same_and_a_terminal_does_nothing_that_it_says(hostile: Path, here: Callable[..., Ended]):
    done = here("show", "plan.yaml", "--json", cwd=hostile)
    assert acted_on(done.stdout) == set()
    assert json.loads(done.stdout)["plan"]["notes"] == ["\x1b]0;owned\a \x1b[2J \x9b31m \u202eevil\u2066"]


@pytest.mark.parametrize("command", ["verify plan.yaml --executor local", "verify plan.yaml --executor local --json"])
def test_an_error_that_quotes_a_plan_is_only_shown(hostile: Path, here: Callable[..., Ended], command: str):
    done = here(*command.split(), cwd=hostile)
    assert done.returncode == 2
    assert acted_on(done.stdout + done.stderr) == set()
    assert r"\x1b[2J" in done.stderr


def test_a_tasks_own_words_are_only_shown(folder: Path, here: Callable[..., Ended]):
    """What it raises ends the search, and its traceback is told."""
    (folder / "healthy.py").write_text(
        "build_model = build_dataset = compute_loss = print\nraise RuntimeError('\\x1b[2J\\u202e')\n"
    )
    done = here(*SEARCH.split(), cwd=folder)
    assert (done.returncode, acted_on(done.stderr)) == (2, set())
    assert r"RuntimeError: \x1b[2J\u202e" in done.stderr


@contextmanager
def on_a_terminal(folder: Path, command: str, **extra: str) -> Iterator[tuple[int, int]]:
    """The pid of a command and a terminal of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and inherited so
        os.execve(PROGRAM[0], [*PROGRAM, *command.split()], environment(TERM="xterm", **extra))
    try:
        yield pid, terminal
    finally:
        os.close(terminal)


def read_until(terminal: int, words: str) -> None:
    said = ""
    while words not in said:
        said += os.read(terminal, 4096).decode(errors="replace")


LONG = SEARCH.replace("--trials 1 ", "--trials 20 ")


@pytest.mark.slow
def test_a_terminal_that_closes_is_one_ctrl_c(folder: Path):
    """The running trial is finished, the best so far is written, and the exit code says so."""
    with on_a_terminal(folder, f"{LONG} -o found.yaml") as (pid, terminal):
        read_until(terminal, "trial 1")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert "stopped: interrupted" in (folder / "found.yaml").read_text()


@pytest.mark.medium
def test_a_terminal_that_closes_before_anything_was_measured_is_an_interruption(folder: Path):
    with on_a_terminal(folder, f"{LONG} -o found.yaml", NO_COLOR="1") as (pid, terminal):
        read_until(terminal, "task:")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert not (folder / "found.yaml").exists()


@pytest.mark.slow
def test_who_no_longer_listens_does_not_decide_the_exit_code(folder: Path):
    """Interrupted, with nobody at the other end of stdout."""
    reader, writer = os.pipe()
    search = subprocess.Popen(
        [*PROGRAM, *LONG.split()], cwd=folder, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    os.close(reader)
    while "trial 1 starts" not in search.stderr.readline():
        pass
    search.send_signal(signal.SIGTERM)
    search.communicate(timeout=600)
    assert search.returncode == 130


def test_a_task_called_as_a_library_is_in_nobodys_way(folder: Path):
    (folder / "numpy.py").write_text("raise RuntimeError('not that numpy')\n")
    assert shell(folder, "show plan.yaml").returncode == 0


@pytest.mark.medium
@pytest.mark.parametrize("command", ["", "''"])
def test_a_job_without_a_command_is_refused(folder: Path, command: str):
    done = shell(folder, f"run plan.yaml -- {command}")
    assert done.returncode == 2
    assert "This is a bug" not in done.stderr
