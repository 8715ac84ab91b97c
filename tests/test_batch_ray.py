"""A batch over a Ray cluster of two nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command_line import ONE_ROUND, start

from autotune.errors import UserError
from autotune.measure.processes import descendants
from autotune.workers import Executor
from autotune.workers.cluster import RayExecutor
from autotune.workers.process import end, identify

pytest.importorskip("ray", reason="Ray is not installed")

SPACE = "schema: autotune/space@1\nprecision: auto\n"
JOBS = """
jobs:
  - {name: one, task: healthy.py, space: space.yaml, device: cpu, trial_time: 0.2s, trials: 2, max_time: 60s}
  - {name: other, task: another.py, space: space.yaml, device: cpu, trial_time: 0.2s, trials: 2, max_time: 60s}
"""
TOKEN = {"RAY_AUTH_MODE": "token"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("healthy.py", "another.py"):
        shutil.copy(Path(__file__).parent / "tasks" / "healthy.py", tmp_path / name)
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "jobs.yaml").write_text(JOBS)
    return tmp_path


@pytest.fixture(scope="module")
def second_node(ray_executor: Executor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Another node of the session's cluster, on this machine."""
    said = tmp_path_factory.mktemp("node") / "node.log"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--num-gpus=0"]
    sized = ["--object-store-memory=100000000", f"--address={ray_executor.address}"]
    with said.open("w+") as log:
        node = subprocess.Popen([*command, *sized], env={**os.environ, **TOKEN}, stdout=log, stderr=log)
        try:
            while "Ray runtime started" not in said.read_text():
                assert node.poll() is None, said.read_text()
            yield
        finally:
            end([process for pid in (node.pid, *descendants(node.pid)) if (process := identify(pid))])
            node.wait()


def test_both_nodes_run_trials_and_the_summary_says_how_busy_they_were(ray_executor, second_node, folder):
    """Two jobs at once: neither node is idle for the whole of it."""
    running = start("batch", "jobs.yaml", "--address", ray_executor.address, cwd=folder, program=ONE_ROUND, **TOKEN)
    ended = running.finish(timeout_s=240)
    assert ended.returncode == 0, ended.stderr
    summary = yaml.safe_load((folder / "plans" / "summary.yaml").read_text())
    assert [job["state"] for job in summary["jobs"]] == ["done", "done"]
    assert len(summary["devices"]) == 2
    for device in summary["devices"]:
        assert device["runs"] > 0
        assert 0 < device["busy"] <= 1
    assert all(device["name"] in ended.stderr for device in summary["devices"])


def test_what_no_node_has_is_refused(ray_executor, second_node, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(UserError, match=r"device cpu:abacus: there is no such device\. There are: 2 x"):
        RayExecutor(device_name="abacus", address=ray_executor.address)
