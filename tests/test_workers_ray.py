"""The Ray executor holds the contract, and survives what Ray adds to go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray")

from autotune.testing.executors import IsolationContract
from autotune.workers import Measured
from autotune.workers.ray_pool import RayExecutor


class TestRayExecutor(IsolationContract):
    tasks = Path(__file__).parent / "tasks"
    executor_class = RayExecutor

    @pytest.fixture
    def executor(self, ray_executor):
        return ray_executor

    def test_a_trial_is_a_descendant_of_a_ray_worker(self, executor, folder):
        assert any(name.startswith("ray::") for name in self.about(executor, folder)["ancestors"])

    def test_a_killed_worker_is_replaced_and_the_trial_asked_again(self, executor, folder):
        assert isinstance(self.kill_above(executor, folder, generations=2), Measured)
