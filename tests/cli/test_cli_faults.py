"""What may go wrong around a search, done to the real command: nothing of it is stored, and nothing is left.

One fault of each kind; ``python -m benchmarks.faults`` does hundreds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from command_line import Running, start
from full_disk import fill

from autotune.measure.processes import descendants
from autotune.testing.executors import Pids, wait_for_end
from autotune.workers.process import ProcessId, identify, name_of

NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
SHORT = ("--trial-time", "1s", "--space", "space.yaml")


@pytest.fixture
def pids(folder: Path) -> Iterator[Pids]:
    pids = Pids(folder / "pids")
    yield pids
    pids.close()


def stored(folder: Path, stem: str) -> list[str]:
    """Kinds of the outcomes that a study holds."""
    trials = optuna.load_study(study_name=f"{stem}-1", storage=f"sqlite:///{folder}/.autotune/{stem}.db").trials
    return [trial.user_attrs["outcome"]["kind"] for trial in trials if "outcome" in trial.user_attrs]


@pytest.mark.slow
def test_a_daemon_without_an_environment_ends_with_the_server_that_was_killed(folder: Path, pids: Pids):
    """Its parents are gone and it has no mark; the task is read again as if nothing had happened."""
    os.mkfifo(folder / "said")
    running = start("search", "hostile_hides_a_daemon.py", "--executor", "local", "--dry-run", *SHORT, cwd=folder)
    daemon = pids.read(1)
    (folder / "said").open("w").close()
    ended = running.finish()
    assert ended.returncode == 0, ended.stderr
    assert wait_for_end(daemon) == []


def core_process(running: Running, name: str) -> ProcessId:
    """One of the processes of the cluster that a command starts, as soon as there is one."""
    patience = threading.Event()
    while running.process.poll() is None:
        for process in filter(None, map(identify, descendants(running.process.pid))):
            if name_of(process) == name:
                return process
        patience.wait(0.01)
    raise AssertionError(f"no {name} was started: {running.finish()}")


def ray_folder(process: ProcessId) -> Path:
    """Where a cluster keeps its files."""
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
    found = re.search(r"/[^\0=]*/autotune-ray-[^/\0]*", command)
    assert found, command
    return Path(found[0])


@pytest.mark.medium
@NEEDS_RAY
def test_a_signal_while_ray_starts_ends_the_search_and_leaves_nothing(folder: Path):
    running = start("search", "healthy.py", *SHORT, cwd=folder)
    files = ray_folder(core_process(running, "gcs_server"))
    running.process.send_signal(signal.SIGTERM)
    ended = running.finish()
    assert (ended.returncode, ended.stdout, ended.left_behind) == (130, "", [])
    assert "Traceback" not in ended.stderr
    assert not files.exists()


@pytest.mark.slow
@NEEDS_RAY
def test_a_cluster_that_dies_while_it_starts_is_said_at_once(folder: Path):
    """Ray itself waits for half a minute, and says that it could not be reached."""
    running = start("search", "healthy.py", *SHORT, cwd=folder)
    process = core_process(running, "raylet")
    files = ray_folder(process)
    os.kill(process.pid, signal.SIGKILL)
    ended = running.finish()
    assert (ended.returncode, ended.stdout, ended.left_behind) == (2, "", [])
    assert "died while it was started. Or use --executor local." in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not files.exists()


@pytest.mark.slow
@NEEDS_RAY
def test_a_joined_cluster_that_dies_is_an_error_with_what_to_do(folder: Path):
    """Its control process is killed in a trial."""
    from autotune.workers.cluster import RayExecutor

    with RayExecutor() as cluster:
        options = ("--address", cluster.address, "--trials", "9", *SHORT)
        variables = {"RAY_AUTH_MODE": "token", "RAY_gcs_rpc_server_reconnect_timeout_s": "15"}
        running = start("search", "healthy.py", *options, cwd=folder, **variables)
        said = running.read_until("trial 1 starts")
        below = filter(None, map(identify, descendants(cluster._process.pid)))  # the session may have another
        (control,) = (process for process in below if name_of(process) == "gcs_server")
        os.kill(control.pid, signal.SIGKILL)
        ended = running.finish()
    assert (ended.returncode, ended.stdout) == (2, ""), said
    assert ended.stderr.endswith(
        f"the Ray cluster at {cluster.address} has died.\n"
        "Every trial that ended is kept: --resume goes on from there.\n"
    )
    assert "gcs" not in ended.stderr  # Ray's own lines
    assert set(stored(folder, "healthy")) == {"measured"}


@pytest.mark.slow
def test_a_full_disk_for_temporary_files_ends_a_search_that_goes_on_once_there_is_room(folder: Path, small_disk: Path):
    """Every trial was stored as crashed, and the plan was the reference. There are more configurations than can be
    measured before the disk is full."""
    with (folder / "space.yaml").open("a") as space:
        space.write("optimizer: [{kind: default}, {kind: for_loop}, {kind: foreach}]\n")
    options = ("search", "healthy.py", "--executor", "local", "--trials", "9", "--sampler", "random", *SHORT)
    running = start(*options, cwd=folder, TMPDIR=str(small_disk))
    running.read_until("reference:")
    fill(small_disk)
    full = running.finish()
    assert (full.returncode, full.stdout, full.left_behind) == (2, "", [])
    assert re.search(rf"{small_disk}/autotune-.*: No space left on device.*--resume", full.stderr, re.DOTALL)
    before = stored(folder, "healthy")
    assert set(before) == {"measured"}
    (small_disk / "ballast").unlink()
    resumed = start(*options, "--resume", cwd=folder, TMPDIR=str(small_disk))
    resumed.read_until(" starts")
    resumed.process.send_signal(signal.SIGINT)
    ended = resumed.finish()
    assert (ended.returncode, ended.stdout) == (130, "plan.yaml\n"), ended.stderr
    assert stored(folder, "healthy") == [*before, "measured"]


@pytest.mark.slow
def test_a_working_folder_that_is_deleted_in_a_trial_is_said(folder: Path):
    """Forked trials ran on, fresh interpreters did not start, and nothing seemed to fit."""
    work = folder / "work"
    work.mkdir()
    storage = f"sqlite:///{folder}/study.db"
    options = ("--executor", "local", "--storage", storage, "-o", folder / "plan.yaml")
    task, space = folder / "healthy.py", folder / "space.yaml"
    running = start("search", task, *options, "--trial-time", "1s", "--space", space, cwd=work)
    running.read_until("reference (the job as it stands) starts")
    shutil.rmtree(work)
    ended = running.finish()
    assert (ended.returncode, ended.stdout, ended.left_behind) == (2, "", [])
    assert f"{work} (deleted): trials run in this folder, and it is gone." in ended.stderr
    assert "--resume" in ended.stderr


def test_what_a_killed_owner_left_is_removed_by_the_next_and_what_lives_is_not(tmp_path: Path):
    """A driver and its cluster that were killed at once leave a folder."""
    from autotune.workers.scratch import Scratch

    living = Scratch("autotune-", str(tmp_path))
    pid = os.fork()
    if pid == 0:
        Scratch("autotune-", str(tmp_path))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (tmp_path / "autotune-notes").mkdir()  # somebody else's
    left = set(tmp_path.iterdir()) - {living.path, tmp_path / "autotune-notes"}
    assert len(left) == 1
    last = Scratch("autotune-", str(tmp_path))
    assert set(tmp_path.iterdir()) == {living.path, last.path, tmp_path / "autotune-notes"}
