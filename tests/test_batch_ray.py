"""A batch over a Ray cluster of two nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command_line import start
from ray_node import TOKEN, another_node

from autotune.workers import Executor

pytest.importorskip("ray", reason="Ray is not installed")

SPACE = "schema: autotune/space@1\nprecision: auto\n"
JOBS = """
jobs:
  - {name: one, task: healthy.py, space: space.yaml, device: cpu, trial_time: 0.2s, trials: 2, max_time: 60s}
  - {name: other, task: another.py, space: space.yaml, device: cpu, trial_time: 0.2s, trials: 2, max_time: 60s}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("healthy.py", "another.py"):
        shutil.copy(Path(__file__).parent / "tasks" / "healthy.py", tmp_path / name)
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "jobs.yaml").write_text(JOBS)
    return tmp_path


@pytest.fixture
def second_node(ray_executor: Executor, tmp_path: Path) -> Iterator[None]:
    """Another node of the session's cluster, on this machine."""
    with another_node(ray_executor.address, tmp_path):
        yield


def test_both_nodes_run_trials_and_the_summary_says_how_busy_they_were(ray_executor, second_node, folder):
    """Two jobs at once: neither node is idle for the whole of it. What no node has is refused before anything runs."""
    running = start("batch", "jobs.yaml", "--address", ray_executor.address, cwd=folder, **TOKEN)
    ended = running.finish(timeout_s=240)
    assert ended.returncode == 0, ended.stderr
    summary = yaml.safe_load((folder / "plans" / "summary.yaml").read_text())
    assert [job["state"] for job in summary["jobs"]] == ["done", "done"]
    assert len(summary["devices"]) == 2
    for device in summary["devices"]:
        assert device["runs"] > 0
        assert 0 < device["busy"] <= 1
    assert all(device["name"] in ended.stderr for device in summary["devices"])

    (folder / "jobs.yaml").write_text(JOBS.replace("device: cpu", "device: 'cpu:abacus'"))
    refused = start("batch", "jobs.yaml", "--address", ray_executor.address, cwd=folder, **TOKEN).finish()
    assert refused.returncode == 2
    assert "device cpu:abacus: there is no such device. There are: 2 x" in refused.stderr
