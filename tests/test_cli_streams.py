"""Where output goes wrong: closed, full and narrow streams lose text, and nothing else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command_line import PROGRAM, environment

TASK = Path(__file__).parent / "tasks" / "healthy.py"
SEARCH = "search healthy.py --executor local --trials 1 --trial-time 1s --max-time 5s --space space.yaml"
PLAN = "schema: autotune/plan@1\nsettings: {}\nnotes: ['[/nope] [bold]…[/bold]']\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "healthy.py").write_text(TASK.read_text())
    (tmp_path / "space.yaml").write_text("schema: autotune/space@1\nbatch: auto\n")
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


def shell(folder: Path, command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """``autotune`` with a shell's redirections behind it."""
    program = " ".join(PROGRAM)
    line = ["bash", "-o", "pipefail", "-c", f"{program} {command}"]
    return subprocess.run(line, cwd=folder, env=environment(**extra), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>&-", "2>/dev/full", "2>&1 | head -n 2"])
def test_a_search_goes_on_without_its_streams(folder: Path, closed: str):
    """Daemons have none, disks fill up, readers go: the plan is written."""
    done = shell(folder, f"{SEARCH} -o found.yaml {closed}")
    assert done.returncode == 0, done.stderr
    assert "measured:" in (folder / "found.yaml").read_text()
    assert closed != "2>&-" or done.stdout == "found.yaml\n"


def test_stdout_that_is_full_is_said(folder: Path):
    done = shell(folder, "show plan.yaml >/dev/full")
    assert done.returncode == 2
    assert done.stderr == "What was to be printed could not be written: No space left on device.\n"


def test_a_reader_that_has_had_enough_is_no_error(folder: Path):
    assert shell(folder, "show plan.yaml | true").stderr == ""


def test_text_that_a_terminal_has_no_letters_for_is_replaced(folder: Path):
    done = shell(folder, "show plan.yaml", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_users_brackets_are_a_users_brackets(folder: Path):
    assert "[/nope] [bold]…[/bold]" in shell(folder, "show plan.yaml").stdout
    document = json.loads(shell(folder, "show plan.yaml --json").stdout)
    assert document["plan"]["notes"] == ["[/nope] [bold]…[/bold]"]


def test_a_task_called_as_a_library_is_in_nobodys_way(folder: Path):
    (folder / "numpy.py").write_text("raise RuntimeError('not that numpy')\n")
    assert shell(folder, "show plan.yaml").returncode == 0


@pytest.mark.parametrize("command", ["", "''"])
def test_a_job_without_a_command_is_refused(folder: Path, command: str):
    done = shell(folder, f"run plan.yaml -- {command}")
    assert done.returncode == 2
    assert "This is a bug" not in done.stderr
