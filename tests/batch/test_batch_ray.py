"""A batch over a Ray cluster of two nodes, of which one is killed; a third joins later, and drains."""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from command_line import ONE_ROUND, Ended, Running, start
from held_task import HELD
from ray_node import TOKEN, Node, another_node

from autotune.errors import UserError
from autotune.measure.processes import descendants
from autotune.testing.executors import wait_for_end
from autotune.workers import Executor
from autotune.workers.cluster import RayExecutor
from autotune.workers.process import ProcessId, identify

pytest.importorskip("ray", reason="Ray is not installed")

SPACE = "schema: autotune/space@1\nprecision: auto\n"
JOBS = """
jobs:
  - {name: one, task: one.py, space: space.yaml, device: cpu, trial_time: 0.2s, trials: 1}
  - {name: other, task: other.py, space: space.yaml, device: cpu, trial_time: 0.2s, trials: 1}
"""
LOOK = threading.Event()
"""Nobody sets it."""


@dataclass(frozen=True)
class Measurements:
    """Those of a batch, each held until it is let go."""

    folder: Path
    running: Running

    def begun(self) -> set[int]:
        """Pids, also of those that have ended."""
        return {int(path.name.partition("-")[2]) for path in self.folder.glob("begun-*")}

    def let_go(self, pids: set[int]) -> None:
        for pid in pids:
            (self.folder / f"go-{pid}").touch()

    def held_on(self, where: Node) -> ProcessId:
        """One that is held on a node."""
        while True:
            here = self.begun() & {*descendants(where.process.pid)}
            for process in filter(None, map(identify, here)):
                return process
            self.wait()

    def wait(self) -> None:
        """A moment, in which the batch goes on."""
        if self.running.process.poll() is not None:
            raise AssertionError(f"the batch has ended: {self.running.finish()}")
        LOOK.wait(0.05)


@dataclass(frozen=True)
class Seen:
    """What came of the batch."""

    folder: Path
    ended: Ended
    summary: dict[str, Any]
    killed: ProcessId
    """The measurement that was held on the node that was killed."""
    drained: str
    """What the node said that was told to drain."""


@pytest.fixture(scope="module")
def seen(ray_executor: Executor, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Two jobs. SIGKILL to the second node's raylet while both nodes measure. A third gets what was lost, for the first
    is held, and SIGTERM in the middle of that, which may end."""
    folder = tmp_path_factory.mktemp("batch")
    for name in ("one", "other"):
        (folder / f"{name}.py").write_text(HELD.format(name=name, folder=str(folder)))
    (folder / "space.yaml").write_text(SPACE)
    (folder / "jobs.yaml").write_text(JOBS)
    with another_node(ray_executor.address, folder / "dies.log") as dies:
        running = start("batch", "jobs.yaml", "--address", ray_executor.address, cwd=folder, program=ONE_ROUND, **TOKEN)
        measurements = Measurements(folder, running)
        killed = measurements.held_on(dies)
        os.kill(dies.raylet().pid, signal.SIGKILL)
        with another_node(ray_executor.address, folder / "drains.log") as drains:
            measurements.held_on(drains)
            drains.process.send_signal(signal.SIGTERM)
            while drains.process.poll() is None:
                measurements.let_go(measurements.begun())
                LOOK.wait(0.05)
        (folder / "go").touch()
        ended = running.finish(timeout_s=500)
    assert ended.returncode == 0, ended.stderr
    summary = yaml.safe_load((folder / "plans" / "summary.yaml").read_text())
    return Seen(folder, ended, summary, killed, (folder / "drains.log").read_text())


@pytest.mark.slow
def test_a_batch_ends_with_its_plans_though_nodes_die_and_drain(seen):
    """What runs on a lost node runs again elsewhere: no outcome is of the loss."""
    assert [job["state"] for job in seen.summary["jobs"]] == ["done", "done"]
    for job in seen.summary["jobs"]:
        assert (seen.folder / job["plan"]).exists()
        storage = f"sqlite:///{seen.folder}/plans/studies/{job['name']}.db"
        trials = optuna.load_study(study_name=f"{job['name']}-1", storage=storage).trials
        told = [trial.user_attrs["outcome"]["kind"] for trial in trials]
        assert told == ["measured"] * job["trials"]


@pytest.mark.slow
def test_each_trial_is_told_once_and_nothing_is_left_of_the_lost_one(seen):
    """One of the two references was measured on the node that was killed."""
    told = re.findall(r"^(one|other) \[[^]]*\] reference: .* samples/s", seen.ended.stderr, re.MULTILINE)
    assert sorted(told) == ["one", "other"]
    assert wait_for_end([seen.killed]) == []


@pytest.mark.slow
def test_the_summary_says_how_busy_each_node_was(seen):
    """The first node, and the one that joined later."""
    assert len(seen.summary["devices"]) >= 2
    for device in seen.summary["devices"]:
        assert device["runs"] > 0
        assert 0 < device["busy"] <= 1
        assert device["name"] in seen.ended.stderr


def test_a_node_that_drains_ends_as_soon_as_its_trial_has(seen):
    """Its actor is let go, and nothing else is begun there: it would be killed after 30 s otherwise."""
    assert "finished draining" in seen.drained
    assert "did not finish draining" not in seen.drained


@pytest.mark.medium
def test_what_no_node_has_is_refused(ray_executor, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(UserError, match=r"device cpu:abacus: there is no such device\. There are: 1 x"):
        RayExecutor(device_name="abacus", address=ray_executor.address)
